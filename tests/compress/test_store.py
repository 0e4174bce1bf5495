from __future__ import annotations

import gc
import weakref

import pytest
import torch

from mimicnorm.compress.codec import Code, Kind
from mimicnorm.compress.store import Plain, Store, View

RELU = Code(Kind.ABOVE, 8)


def marked(*shape: int) -> tuple[Store, torch.Tensor]:
    store, x = Store(seed=0), torch.rand(shape)
    store.mark(x, RELU)
    return store, x


VIEWS = {
    "flatten": lambda x: x.flatten(1),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "half of the channels": lambda x: x[:, :4],
    "every other column": lambda x: x[..., 1::2],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1, -1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_one_payload(name):
    store, x = marked(4, 8, 6, 6)
    whole, view = store.pack(x), store.pack(VIEWS[name](x))
    assert isinstance(view, View)
    assert view.encoded is whole.encoded
    with torch.no_grad():
        assert torch.equal(view.tensor(), VIEWS[name](whole.tensor()))


def test_memory_formats_come_back():
    store, x = marked(2, 8, 6, 6)
    last = x.to(memory_format=torch.channels_last)
    store.mark(last, RELU)
    with torch.no_grad():
        back = store.pack(last).tensor()
    assert back.stride() == last.stride()
    assert torch.allclose(back, last, atol=0.01)


def test_a_tensor_with_gaps_is_copied_and_found_again():
    store = Store(seed=0)
    x = torch.rand(4, 8, 6, 6)[:, 1::2]
    store.mark(x, RELU)
    first, again = store.pack(x), store.pack(x)
    assert first.encoded is again.encoded
    with torch.no_grad():
        assert torch.allclose(first.tensor(), x, atol=0.01)
    other = store.pack(x[:, :1])
    assert not isinstance(other, View) or other.encoded is not first.encoded


def test_an_in_place_operation_makes_another_payload():
    store, x = marked(32, 32)
    before = store.pack(x)
    x.mul_(2)
    store.mark(x, RELU)
    after = store.pack(x)
    assert after.encoded is not before.encoded
    with torch.no_grad():
        assert torch.allclose(after.tensor(), before.tensor() * 2, atol=0.02)


def test_what_is_saved_as_it_is_stays_so_for_all():
    store, x = Store(seed=0), torch.rand(32, 32)
    plain = store.pack(x)
    store.mark(x, RELU)
    assert isinstance(plain, Plain)
    assert store.pack(x) is plain  # a payload beside it would only add to it
    del plain
    assert isinstance(store.pack(x), View)


def test_tensors_too_small_to_gain_are_saved_as_they_are():
    store, x = marked(8)
    assert isinstance(store.pack(x), Plain)


def test_a_kept_tensor_that_was_overwritten_is_an_error():
    x = torch.rand(3)
    plain = Store(seed=0).pack(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="in-place"):
        plain.tensor()


def test_the_store_holds_no_storage_and_a_dead_one_is_forgotten():
    store, x = marked(64, 64)
    held = store.pack(x)
    storage = weakref.ref(x.untyped_storage())
    del x
    gc.collect()
    assert storage() is None
    codes = weakref.ref(held.encoded.codes)
    del held
    gc.collect()
    assert codes() is None
    assert not any(e.encoded or e.marks for e in store._entries.values())


def test_an_address_that_is_used_again_has_no_marks():
    store = Store(seed=0)
    for _ in range(50):
        x = torch.rand(64, 64)
        assert store.kind(x) is None
        store.mark(x, RELU)
        assert store.kind(x) is Kind.ABOVE
        del x


def test_hooks_outside_get_what_is_held():
    seen = []

    def pack(tensor):
        seen.append(tensor.nbytes)
        return "held", tensor

    store, x = Store(0, (pack, lambda held: held[1])), torch.rand(64, 64)
    store.mark(x, RELU)
    view = store.pack(x)
    assert sorted(seen) == [2 * 16, 4096]
    with torch.no_grad():
        assert torch.allclose(view.tensor(), x, atol=0.01)
