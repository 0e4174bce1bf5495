import copy
import random
from contextlib import nullcontext

import numpy
import pytest
import torch
import zoo
from profiled_step import profiled_peak
from torch import nn
from torch.utils.checkpoint import checkpoint

import mimicnorm as mn
from mimicnorm.errors import ExampleError, MemoryPredictionError
from mimicnorm.memory import measure, tracker

FLOAT = 4
SHAPE = (4, 3, 10, 10)


def small():
    """Conv to 8 x 8 x 8, BatchNorm, ReLU, classes."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


def test_saved_bytes_are_those_of_the_arithmetic():
    feature_map = 4 * 8 * 8 * 8 * FLOAT
    analysis = measure(small(), SHAPE)
    statistics = 2 * 8 * FLOAT
    loss = 4 * 10 * FLOAT + 4 * 8 + FLOAT  # log-probabilities, targets, weight of the mean
    assert analysis.saved_bytes == 2 * feature_map + statistics + loss  # BatchNorm's input, ReLU's output
    assert analysis.by_module() == {"1": feature_map + statistics, "2": feature_map, "(loss)": loss}
    assert analysis.inputs == 4 * 3 * 100 * FLOAT


def test_parameters_gradients_and_state_are_those_of_the_arithmetic():
    parameters = (8 * 3 * 9 + 2 * 8 + 512 * 10 + 10) * FLOAT
    for optimizer, copies in [("sgd", 0), ("sgd-momentum", 1), ("adamw", 2)]:
        analysis = measure(small(), SHAPE, optimizer=optimizer)
        assert analysis.parameters == analysis.gradients == parameters
        assert analysis.buffers == 2 * 8 * FLOAT + 8
        counters = 5 * FLOAT if optimizer == "adamw" else 0
        assert analysis.optimizer_state == copies * parameters + counters
    assert {moment.phase for moment in measure(small(), SHAPE, optimizer=None).timeline} == {"forward", "backward"}


def test_a_frozen_layer_has_no_gradient_and_no_state():
    model = small()
    model[4].requires_grad_(False)
    analysis = measure(model, SHAPE)
    assert analysis.gradients == analysis.optimizer_state == analysis.parameters - (512 * 10 + 10) * FLOAT


def test_fake_and_real_tensors_give_the_same_numbers():
    fake, real = (measure(small(), SHAPE, optimizer="adamw", fake=fake) for fake in (True, False))
    assert fake.as_dict() == real.as_dict()


@pytest.mark.parametrize(
    ("name", "batch", "optimizer"),
    [("resnet18", 9, "sgd-momentum"), ("squeezenet1_1", 16, "adamw"), ("mobilenet_v2 converted", 5, "sgd-momentum")],
)
def test_the_predicted_peak_is_what_a_profiled_step_allocates(name, batch, optimizer):
    if name == "resnet18" and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("without AVX-512, oneDNN takes more for the gradients of its last weights (docs/memory.md)")
    name, _, converted = name.partition(" ")
    shape = (batch, 3, 64, 64)
    model = getattr(zoo.torchvision().models, name)()
    if converted:
        mn.convert_(model, mn.MimicNorm(), example=shape, init=None)
    predicted = measure(model, shape, optimizer=optimizer).peak_bytes
    assert predicted == pytest.approx(profiled_peak(lambda: copy.deepcopy(model), shape, optimizer), rel=2e-3)


def test_a_huge_batch_is_not_allocated():
    assert measure(small(), (10**7, 3, 10, 10)).saved_bytes > 40e9


class Remembers(nn.Module):
    """Everything that a careless measurement would leave changed; ``isolate`` is tested for the rest."""

    def __init__(self, fails):
        super().__init__()
        self.body, self.seen, self.last, self.fails = small(), [], None, fails

    def forward(self, x):
        self.last = x * random.random() * numpy.random.rand() * torch.rand(())
        self.seen.append(self.last)
        out = self.body(self.last)
        if self.fails:
            raise RuntimeError("no luck")
        return out


def state(model):
    values = [t for tensor in model.state_dict(keep_vars=True).values() for t in (tensor, tensor.grad) if t is not None]
    tensors = [(id(tensor), tensor.tolist()) for tensor in values]
    modules = [(module.training, len(vars(module))) for module in model.modules()]
    generators = (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist())
    return tensors, modules, generators, model.last, list(model.seen)


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_model_and_the_random_numbers_come_back_untouched(fake, fails):
    model = Remembers(fails).eval()
    model.body[1].train()
    model.body[4].weight.grad = torch.ones(10, 512)
    before = state(model)
    with pytest.raises(ExampleError, match="no luck") if fails else nullcontext():
        measure(model, SHAPE, fake=fake)
    assert state(model) == before


def test_measuring_works_where_gradients_are_off():
    model = small()
    expected = measure(model, SHAPE).as_dict()
    with torch.no_grad():
        assert measure(model, SHAPE).as_dict() == expected
    with torch.inference_mode():
        assert measure(model, SHAPE).as_dict() == expected
        assert torch.is_inference_mode_enabled()


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.regions = nn.Linear(64, 64), nn.ModuleList([small_mlp(), small_mlp()])
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for region in self.regions:
            x = region(x) if self.reentrant is None else checkpoint(region, x, use_reentrant=self.reentrant)
        return x


def small_mlp():
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 64))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_saves_only_the_inputs_of_its_regions(reentrant):
    plain = measure(Checkpointed(None), (1000, 64))
    model = Checkpointed(reentrant)
    rng = torch.get_rng_state()
    checkpointed = measure(model, (1000, 64))
    assert torch.equal(torch.get_rng_state(), rng)
    loss = plain.by_module()["(loss)"]
    assert checkpointed.saved_bytes - loss == 2 * 1000 * 64 * FLOAT
    assert checkpointed.peak_bytes < 0.7 * plain.peak_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_halves_the_activations_given_or_active(dtype):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    full, half = (measure(model, (4096, 64), autocast=dtype) for dtype in (None, dtype))
    layers = [str(index) for index in range(5)]
    saved_full, saved_half = (sum(a.saved_by_module.get(i, 0) for i in layers) for a in (full, half))
    cast_input = 4096 * 64 * 2
    cast_weights = 2 * 64 * 64 * 2  # the first layer's is not saved: the input needs no gradient
    assert saved_half - cast_weights - cast_input == saved_full // 2
    with torch.autocast("cpu", dtype):
        assert measure(model, (4096, 64)).saved_bytes == half.saved_bytes


def test_channels_last_costs_the_same_except_for_what_a_layer_must_copy():
    images = torch.zeros(SHAPE).to(memory_format=torch.channels_last)
    flat = small().to(memory_format=torch.channels_last)
    assert measure(flat, images).by_module()["4"] == 4 * 512 * FLOAT  # flattening had to reorder
    pooled = nn.Sequential(*small()[:3], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    expected = measure(pooled, SHAPE).by_module()
    assert measure(pooled.to(memory_format=torch.channels_last), images).by_module() == expected


class SavesItsInput(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x


def test_custom_functions_are_counted_by_what_they_save():
    class Doubled(nn.Linear):
        def forward(self, x):
            return SavesItsInput.apply(super().forward(x))

    analysis = measure(Doubled(8, 8), (16, 8), loss=lambda output: output.sum())
    assert analysis.by_module() == {"(model)": 16 * 8 * FLOAT}


@pytest.mark.parametrize("fake", [True, False])
def test_inputs_are_copied_in_their_layout_and_stay_as_they_were(fake):
    class ChangesItsInput(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 2, 1)

        def forward(self, x, y):
            assert x is y
            assert x.is_contiguous(memory_format=torch.channels_last)
            assert x.requires_grad
            x.data.mul_(2)
            return self.layer(x).mean((2, 3))

    x = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    assert measure(ChangesItsInput(), (x, x), fake=fake).inputs == x.numel() * FLOAT
    assert x.max() == 1
    assert x.grad is None
    assert measure(nn.Linear(8, 3), torch.zeros(1000, 8)[:4], fake=fake).inputs == 4 * 8 * FLOAT  # of a view, its part


@pytest.mark.parametrize("fake", [True, False])
def test_tensors_made_in_inference_mode_are_taken(fake):
    class Offset(nn.Linear):
        def forward(self, x):
            return super().forward(x + self.offset)

    plain = Offset(8, 3)
    plain.offset = torch.ones(8)
    expected = measure(plain, (4, 8)).as_dict()
    with torch.inference_mode():
        x, model = torch.ones(4, 8), Offset(8, 3)
        model.offset = torch.ones(8)
    assert measure(plain, x, fake=fake).as_dict() == expected
    assert measure(model, x, fake=fake).as_dict() == expected


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (3, r"the model is a int: give an nn\.Module"),
        (small().forward, "the model is a method"),
        (small().requires_grad_(False), "no parameter that requires a gradient"),
        (nn.ReLU(), "no parameter that requires a gradient"),
        (nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)), r"'1\.weight' has no shape yet"),
    ],
)
def test_what_is_not_a_model_to_train_is_refused(model, message):
    with pytest.raises(MemoryPredictionError, match=message):
        measure(model, SHAPE)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"fake": "no"}, "fake='no': use True or False"),
        *(({name: value}, f"{name}=.*: use a whole number of at least 1")
          for name in ("batch", "micro_batch") for value in ("8", 2.5, True, 0, [8])),
        *(({"autocast": dtype}, "autocast=.*: use torch.bfloat16, torch.float16, or None")
          for dtype in (torch.float32, torch.int8, torch.bool, "bf16", 16)),
        *(({"device": device}, "device=.* is not a device: give 'cpu', 'cuda' or None") for device in ("gpu", 3.5)),
        ({"device": "meta"}, "device='meta', but the model is on cpu: move it first"),
        ({"device": "cuda", "fake": False}, "device='cuda', but the model is on cpu, and fake=False runs"),
    ],
)  # fmt: skip
def test_arguments_that_mean_nothing_are_refused(wrong, message):
    with pytest.raises(MemoryPredictionError, match=message):
        measure(small(), SHAPE, **wrong)


def test_a_loss_and_an_optimizer_of_the_users_are_taken():
    analysis = measure(small(), SHAPE, loss=lambda out: out.square().mean(), optimizer=lambda p: torch.optim.Adagrad(p))
    assert analysis.by_module()["(loss)"] == 4 * 10 * FLOAT
    assert analysis.optimizer_state == analysis.parameters + 5 * FLOAT


def test_a_model_in_evaluation_mode_is_taken_to_training_and_frozen_parts_stay_frozen():
    model = small()
    training = measure(model, SHAPE).as_dict()
    assert measure(model.eval(), SHAPE).as_dict() == training
    model.train()
    model[1].eval()
    assert measure(model, SHAPE).by_module()["1"] != training["by_module"]["1"]  # no statistics of the batch


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert measure(model, (2, 4)).parameters == 16 * FLOAT


def test_batchnorm_under_autocast_saves_the_same_fake_and_real():
    for affine in (True, False):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=affine), nn.ReLU(), nn.Flatten())
        fake, real = (measure(model, (4, 3, 8, 8), autocast=torch.bfloat16, fake=fake) for fake in (True, False))
        assert fake.by_module() == real.by_module()


# What a prediction is for: the CPU with the copies inside its convolutions, or a GPU, which need not be there.
WIDE = (4, 16, 12, 12)


def wide() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(16, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def without_workspaces(monkeypatch, **how):
    with monkeypatch.context() as patched:
        patched.setattr(tracker, "workspace_bytes", lambda *_: 0)
        return measure(wide(), WIDE, **how)


@pytest.mark.parametrize("optimizer", [None, "sgd-momentum"])
def test_copies_inside_convolutions_are_the_cpus_alone(monkeypatch, optimizer):
    on_cpu, on_gpu = (measure(wide(), WIDE, optimizer=optimizer, device=d) for d in ("cpu", "cuda"))
    assert on_cpu.as_dict() == measure(wide(), WIDE, optimizer=optimizer).as_dict()
    assert on_gpu.peak_bytes == without_workspaces(monkeypatch, optimizer=optimizer).peak_bytes < on_cpu.peak_bytes
    assert on_gpu.saved_bytes == on_cpu.saved_bytes
    assert (on_cpu.device, on_gpu.device) == ("cpu", "cuda")


def test_optimizers_work_on_all_parameters_at_once_on_a_gpu(monkeypatch):
    for_gpu = measure(wide(), WIDE, optimizer="adamw", device="cuda:1")
    at_once, in_turn = (
        without_workspaces(monkeypatch, optimizer=lambda p, at_once=at_once: torch.optim.AdamW(p, foreach=at_once))
        for at_once in (True, False)
    )
    assert for_gpu.timeline == at_once.timeline
    assert for_gpu.timeline != in_turn.timeline
    chosen = measure(wide(), WIDE, device="cuda", optimizer=lambda p: torch.optim.AdamW(p, foreach=False))
    assert chosen.timeline == in_turn.timeline  # what the user chooses counts


def test_a_network_without_memory_is_predicted_for_a_gpu():
    empty = wide().to("meta")
    assert measure(empty, WIDE, device="cuda").as_dict() == measure(wide(), WIDE, device="cuda").as_dict()
    with pytest.raises(MemoryPredictionError, match=r"device='cpu', but the model is on meta: move it first"):
        measure(empty, WIDE, device="cpu")
    with pytest.raises(MemoryPredictionError, match=r"there is no autocast on meta, where the model is"):
        measure(empty, WIDE, autocast=torch.bfloat16)
