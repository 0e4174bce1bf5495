import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mimicnorm.memory.tracker import StorageTracker

KIB = 1024  # 256 float32 values


def peak_bytes(tracker):
    return max(moment.total for moment in tracker.timeline)


@pytest.fixture(params=["fake", "real"])
def tensors(request):
    """The tracker must see the same on both kinds."""
    if request.param == "real":
        yield
    else:
        with FakeTensorMode():
            yield


@pytest.mark.usefixtures("tensors")
def test_a_storage_counts_from_its_first_to_its_last_tensor():
    with StorageTracker("cpu") as tracker, tracker.during("forward"):
        a = torch.empty(256)
        b = a + 1
        view = b[10:20]
        del a, b  # the view keeps b's storage
        c = view.new_empty(512)
        del view, c
        torch.empty(256)
    assert [moment.total for moment in tracker.timeline][-1] == 0
    assert peak_bytes(tracker) == (1 + 2) * KIB
    assert tracker.alive_bytes["temporary"] == 0


@pytest.mark.usefixtures("tensors")
def test_views_and_in_place_operations_allocate_nothing():
    with StorageTracker("cpu") as tracker, tracker.during("forward"):
        a = torch.empty(16, 16)
        a.add_(1)
        a.t().reshape(4, 4, 16)[0].mul_(2)
        a.expand(9, 16, 16)
    assert peak_bytes(tracker) == KIB


@pytest.mark.usefixtures("tensors")
def test_a_resized_storage_counts_with_its_new_size():
    with StorageTracker("cpu") as tracker, tracker.during("forward"):
        a = torch.empty(256)
        a.resize_(1024)
    assert peak_bytes(tracker) == 4 * KIB


@pytest.mark.usefixtures("tensors")
def test_gradients_of_one_tensor_are_summed_in_place_as_without_a_tracker():
    x = torch.empty(256, requires_grad=True)
    with StorageTracker("cpu") as tracker:
        y = x * 2
        z = y.sin().sum() + y.cos().sum()  # two gradients meet at y
        with tracker.during("backward"):
            z.backward()
    saved_by_sin_cos = KIB  # y
    two_gradients_and_the_factor_of_the_second = 3 * KIB
    assert peak_bytes(tracker) - 3 * 4 <= saved_by_sin_cos + two_gradients_and_the_factor_of_the_second


@pytest.mark.usefixtures("tensors")
def test_what_is_saved_keeps_its_first_saver_and_never_takes_parameters_or_inputs():
    with StorageTracker("cpu") as tracker:
        weight, images, middle = torch.empty(256), torch.empty(256), torch.empty(256)
        tracker.add(weight, "parameters")
        tracker.add(images, "inputs")
        for tensor in (weight, images, middle.view(2, 128)):
            tracker.save(tensor, "first")
        tracker.save(middle, "second")
    assert tracker.saved_bytes_by_module() == {"first": KIB}
    assert (tracker.alive_bytes["parameters"], tracker.alive_bytes["inputs"]) == (KIB, KIB)


def test_tensors_on_other_devices_are_left_out():
    with StorageTracker("cpu") as tracker, tracker.during("forward"):
        torch.empty(256, device="meta")
    assert peak_bytes(tracker) == 0


def test_counting_keeps_nothing_alive():
    with StorageTracker("cpu") as tracker:
        a = torch.empty(256)
        tracker.save(a, "module")
        alive = weakref.ref(a)
        del a
        gc.collect()
        assert alive() is None
        assert tracker.saved_bytes_by_module() == {}
