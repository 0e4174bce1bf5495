import copy
import random

import numpy
import pytest
import torch
import zoo
from profiled_step import profiled_peak
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mimicnorm as mn
from mimicnorm.errors import ExampleError, MemoryPredictionError
from mimicnorm.memory import measure

FLOAT = 4
SHAPE = (4, 3, 10, 10)
COMPILING = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch's own use


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
    name, _, converted = name.partition(" ")
    shape = (batch, 3, 64, 64)
    model = getattr(zoo.torchvision().models, name)()
    if converted:
        mn.convert_(model, mn.MimicNorm(), example=shape, init=None)
    predicted = measure(model, shape, optimizer=optimizer).peak_bytes
    assert predicted == pytest.approx(profiled_peak(lambda: copy.deepcopy(model), shape, optimizer), rel=2e-3)


def test_a_huge_batch_is_not_allocated():
    analysis = measure(small(), (10**7, 3, 10, 10))
    assert analysis.saved_bytes > 40e9


class Rememberer(nn.Module):
    """Everything that a careless measurement would leave changed."""

    def __init__(self, fails=False):
        super().__init__()
        self.body = small()
        self.dropout = nn.Dropout(0.5)
        self.seen = []
        self.last = None
        self.fails = fails

    def forward(self, x):
        self.last = self.dropout(x)
        self.seen.append(self.last)
        random.random()
        numpy.random.rand()
        torch.rand(3)
        out = self.body(self.last)
        if self.fails:
            raise RuntimeError("no luck")
        return out


def state(model):
    return {
        "training": [module.training for module in model.modules()],
        "tensors": [tensor.detach().clone() for tensor in model.state_dict().values()],
        "fake": [isinstance(tensor, FakeTensor) for tensor in model.state_dict(keep_vars=True).values()],
        "grads": [parameter.grad for parameter in model.parameters()],
        "attributes": (model.last, list(model.seen)),
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "rng": (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()),
    }


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_model_and_the_random_numbers_come_back_untouched(fake, fails):
    model = Rememberer(fails).eval()
    model.body[1].train()
    model.body[0].weight.grad = torch.ones_like(model.body[0].weight)
    before = state(model)
    if fails:
        with pytest.raises(ExampleError, match="no luck"):
            measure(model, SHAPE, fake=fake)
    else:
        measure(model, SHAPE, fake=fake)
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)


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
def test_checkpointing_keeps_only_the_inputs_of_its_regions(reentrant):
    plain = measure(Checkpointed(None), (1000, 64))
    model = Checkpointed(reentrant)
    rng = torch.get_rng_state()
    kept = measure(model, (1000, 64))
    assert torch.equal(torch.get_rng_state(), rng)
    loss = plain.by_module()["(loss)"]
    assert kept.saved_bytes - loss == 2 * 1000 * 64 * FLOAT
    assert kept.peak_bytes < 0.7 * plain.peak_bytes


def test_autocast_halves_the_activations_given_or_active():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    full, half = (measure(model, (4096, 64), autocast=dtype) for dtype in (None, torch.bfloat16))
    layers = [str(index) for index in range(5)]
    saved_full, saved_half = (sum(a.saved_by_module.get(i, 0) for i in layers) for a in (full, half))
    cast_input = 4096 * 64 * 2
    cast_weights = 2 * 64 * 64 * 2  # the first layer's is not kept: the input needs no gradient
    assert saved_half - cast_weights - cast_input == saved_full // 2
    with torch.autocast("cpu", torch.bfloat16):
        assert measure(model, (4096, 64)).saved_bytes == half.saved_bytes


def test_channels_last_costs_the_same():
    model, images = small(), torch.zeros(SHAPE)
    model.insert(3, nn.AdaptiveAvgPool2d(1))
    model[5] = nn.Linear(8, 10)
    expected = measure(model, images)
    model, images = (thing.to(memory_format=torch.channels_last) for thing in (model, images))
    assert measure(model, images).by_module() == expected.by_module()


def test_what_channels_last_makes_a_layer_copy_is_counted():
    model, images = (thing.to(memory_format=torch.channels_last) for thing in (small(), torch.zeros(SHAPE)))
    assert measure(model, images).by_module()["4"] == 4 * 512 * FLOAT  # flattening had to reorder


class CountsItself(torch.autograd.Function):
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
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x):
            return CountsItself.apply(self.first(x))

    analysis = measure(Net(), (16, 8), loss=lambda output: output.sum())
    assert analysis.by_module() == {"(model)": 16 * 8 * FLOAT}


@COMPILING
def test_a_compiled_network_keeps_what_the_partitioner_keeps():
    model = nn.Sequential(*small()[:3], nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten())
    eager = measure(model, SHAPE)
    predicted = measure(torch.compile(model), SHAPE)

    storages = {}
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    images = torch.rand(SHAPE)
    own.add(images.untyped_storage()._cdata)

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager_decomp_partition")
    own |= {tensor.untyped_storage()._cdata for tensor in (*compiled.parameters(), *compiled.buffers())}
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(compiled(images), torch.zeros(4, dtype=torch.long))
    assert predicted.saved_bytes == sum(storages.values())
    del loss
    assert predicted.saved_bytes < 0.9 * eager.saved_bytes


@COMPILING
def test_compiled_parts_are_found_and_named():
    model = small()
    eager = measure(model, SHAPE)
    model[1] = torch.compile(nn.Sequential(model[1], nn.Tanh(), nn.Sigmoid(), nn.Tanh()))
    part = measure(model, SHAPE)
    assert set(part.by_module()) == {"1", "2", "(loss)"}
    assert part.by_module()["2"] == eager.by_module()["2"]
    with torch._dynamo.config.patch(recompile_limit=1):  # after which the compiler would give up silently
        for batch in (5, 6, 7):
            again = measure(model, (batch, *SHAPE[1:]))
            statistics = part.by_module()["1"] % 4096
            assert (again.by_module()["1"] - statistics) * 4 == (part.by_module()["1"] - statistics) * batch
    assert isinstance(model[1], torch._dynamo.eval_frame.OptimizedModule)


class DataDependent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.picker = nn.Linear(8, 8), nn.Identity()
        self.picker.forward = lambda x: x[x[:, 0] > 0]

    def forward(self, x):
        return self.picker(self.first(x))


def test_a_network_that_needs_values_says_so_and_runs_on_real_ones():
    model = DataDependent()
    with pytest.raises(MemoryPredictionError, match=r"'picker' cannot run on fake tensors.*fake=False"):
        measure(model, (32, 8))
    assert measure(model, torch.randn(32, 8), fake=False).saved_bytes > 0


def test_a_wrong_example_names_the_module():
    with pytest.raises(ExampleError, match=r"module '4' does not run on the example \(\(2, 3, 20, 20\) float32\)"):
        measure(small(), (2, 3, 20, 20))


def test_wrong_arguments_are_explained():
    with pytest.raises(MemoryPredictionError, match=r"'adam' is not known.*'adamw'"):
        measure(small(), SHAPE, optimizer="adam")
    with pytest.raises(MemoryPredictionError, match="the model is a method"):
        measure(small().forward, SHAPE)
    with pytest.raises(MemoryPredictionError, match=r"autocast='bf16': autocast runs in torch.bfloat16"):
        measure(small(), SHAPE, autocast="bf16")
    with pytest.raises(MemoryPredictionError, match="batch=0: give a whole number of samples"):
        measure(small(), SHAPE, batch=0)

    class Detached(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    with pytest.raises(MemoryPredictionError, match="no tensor that requires a gradient"):
        measure(Detached(2, 2), (2, 2))


def test_own_loss_and_optimizer_are_taken():
    analysis = measure(small(), SHAPE, loss=lambda out: out.square().mean(), optimizer=lambda p: torch.optim.Adagrad(p))
    assert analysis.by_module()["(loss)"] == 4 * 10 * FLOAT
    assert analysis.optimizer_state == analysis.parameters + 5 * FLOAT


def test_outputs_in_containers_all_reach_the_loss():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 1)

        def forward(self, x):
            return {"classes": self.a(x), "value": [self.b(x).squeeze(1)]}

    analysis = measure(TwoHeads(), (16, 8))
    assert analysis.gradients == analysis.parameters
