from __future__ import annotations

import copy
import gc
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
import zoo
from gradients import cosine, counted, gradients, saved_in
from torch import nn
from torch.utils.checkpoint import checkpoint

import mimicnorm as mn
from mimicnorm import microbatch
from mimicnorm.compress import enable_, saved_activations
from mimicnorm.errors import CompressionError


def converted(name: str, pixels: int, method: mn.methods.Method | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = getattr(zoo.torchvision().models, name)(num_classes=10)
    mn.convert_(model, method or mn.MimicNorm(), example=(2, 3, pixels, pixels))
    return model


def small() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.ReLU(True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(576, 5),
    )


X = torch.randn(8, 3, 18, 18, generator=torch.Generator().manual_seed(5))


# -- the exactness claim -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "shufflenet_v2_x0_5"])
def test_every_bias_gradient_of_a_relu_network_is_bit_equal(name, bits):
    model, x = converted(name, 32), torch.randn(4, 3, 32, 32)
    loss = lambda y: F.cross_entropy(y, torch.arange(4))  # noqa: E731
    right, found = gradients(model, x, None, loss), gradients(model, x, bits, loss)
    biases = [n for n in right if n.endswith("bias")]
    assert len(biases) > 10
    assert [n for n in ("input", *biases) if not torch.equal(found[n], right[n])] == []
    assert cosine(found, right) > {8: 0.9999, 4: 0.95}[bits]
    lossless = gradients(model, x, 32, loss)
    assert [n for n in right if not torch.equal(lossless[n], right[n])] == []


@pytest.mark.parametrize("method", [mn.BatchNorm(), mn.GroupNormWS(), mn.Fixup(), mn.ScaledWS(), mn.NoNorm()])
def test_every_method_runs(method):
    model, x = converted("resnet18", 32, method), torch.randn(8, 3, 32, 32)
    loss = lambda y: F.cross_entropy(y, torch.arange(8))  # noqa: E731
    right, found = gradients(model, x, None, loss), gradients(model, x, 8, loss)
    assert cosine(found, right) > 0.99
    assert torch.equal(found["input"], right["input"]) == (method.name not in ("batchnorm", "groupnorm-ws"))


# -- together with what else torch has ---------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_micro_batches_and_a_first_pass_that_saves_nothing(bits):
    model, y = converted("resnet18", 32), torch.arange(8)
    x = torch.randn(8, 3, 32, 32)
    microbatch.backward(model, F.cross_entropy, x, y, micro_batch=4)
    right = {n: p.grad.clone() for n, p in model.named_parameters()}
    for context in (bits, None):
        model.zero_grad()
        if context is None:
            enable_(model, bits)
        with saved_in(context):
            microbatch.backward(model, F.cross_entropy, x, y, micro_batch=4)
        found = {n: p.grad for n, p in model.named_parameters()}
        assert all(torch.equal(found[n], right[n]) for n in right if n.endswith("bias"))
        assert not torch.equal(found["layer1.0.conv1.weight"], right["layer1.0.conv1.weight"])


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module, inner_bits: int | None = None):
        super().__init__()
        self.model, self.inner_bits = model, inner_bits

    def forward(self, x):
        return checkpoint(self._inner, x, use_reentrant=False)

    def _inner(self, x):
        with saved_in(self.inner_bits):
            return self.model(x)


@pytest.mark.parametrize("inner", [None, 4])
def test_inside_a_checkpoint_nothing_is_compressed(inner):
    model = small()
    right = gradients(model, X, None)
    found = gradients(Checkpointed(model, inner), X, 4 if inner is None else None)
    assert all(torch.equal(found[n if n == "input" else f"model.{n}"], right[n]) for n in right)


def test_what_is_outside_of_a_checkpoint_is_compressed():
    model = nn.Sequential(small()[:3], Checkpointed(small()[3]), nn.ReLU(), nn.Conv2d(16, 4, 3))
    right, found = gradients(model, X, None), gradients(model, X, 4)
    assert torch.equal(found["input"], right["input"])
    assert torch.equal(found["1.model.weight"], right["1.model.weight"])
    assert not torch.equal(found["3.weight"], right["3.weight"])


def test_activations_kept_on_the_host_are_kept_there_in_few_bits():
    model, grads = small(), []
    for outside in (torch.autograd.graph.save_on_cpu(), nullcontext()):
        model.zero_grad()
        with outside, saved_activations(8):
            loss = model(X).square().sum()
        loss.backward()
        grads.append(model[3].weight.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("last", [False, True])
def test_autocast_and_channels_last(last):
    model, x = small(), X
    if last:
        model, x = model.to(memory_format=torch.channels_last), X.to(memory_format=torch.channels_last)
    results = []
    for bits in (None, 8):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(gradients(model, x, bits))
    right, found = results
    for name in ("input", *(n for n in right if n.endswith("bias"))):
        assert torch.equal(found[name], right[name])
    assert cosine(found, right) > 0.999


def test_autocast_copies_of_weights_are_left_alone_and_activations_are_not():
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    x = torch.randn(512, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), counted() as found, saved_activations(8):
        loss = model(x * 1).sum()
    sizes = sorted(found.values())
    assert 2 * 512 * 64 not in sizes  # the input of a linear layer in bf16
    assert sizes.count(2 * 64 * 64) >= 1
    loss.backward()


def test_second_derivatives_are_refused_and_lossless_ones_are_right():
    x = torch.randn(4, 3, 18, 18, requires_grad=True)
    model = small()
    for bits in (8, 4):
        with saved_activations(bits):
            loss = model(x).square().sum()
        with pytest.raises(CompressionError, match="create_graph=True"):
            torch.autograd.grad(loss, x, create_graph=True)

    def penalty(bits):
        with saved_in(bits):
            loss = model(x).square().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), model[0].weight)[0]

    assert torch.equal(penalty(32), penalty(None))


def test_a_graph_may_be_walked_twice():
    model = small()
    with saved_activations(4):
        loss = model(X).square().sum()
    loss.backward(retain_graph=True)
    once = model[3].weight.grad.clone()
    loss.backward()
    assert torch.equal(model[3].weight.grad, 2 * once)


@pytest.mark.slow
def test_compiled_models_are_refused():
    model = small()
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(CompressionError, match="compiled model"), saved_activations(8):
        compiled(X)
    with pytest.raises(CompressionError, match="compiled"):
        enable_(compiled)
    model.compile(backend="aot_eager")
    with pytest.raises(CompressionError, match="compiled"):
        enable_(nn.Sequential(model))


# -- memory ------------------------------------------------------------------------------------------------------


def test_nothing_outlives_the_graph():
    model = small()

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    before = alive()
    for _ in range(3):
        with saved_activations(8):
            y = torch.exp(model(X))  # which saves its own output
        del y
    gc.disable()  # no cycles: what is dropped goes at once
    try:
        with saved_activations(8):
            y = model(X)
        assert alive() > before
        del y
    finally:
        gc.enable()
    assert alive() == before


# -- seeds -------------------------------------------------------------------------------------------------------


def test_rounding_follows_from_the_seed():
    model = small()
    name = "3.weight"
    first, again, other = (gradients(model, X, 4, seed=s)[name] for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_passes_differ_and_random_numbers_of_the_network_do_not_move():
    model = nn.Sequential(small()[:5], nn.Dropout(0.5))
    outputs, grads = [], []
    for bits in (None, 4, 4):
        torch.manual_seed(3)
        model.zero_grad()
        with saved_in(bits):
            y = model(X)
        y.sum().backward()
        outputs.append(y.detach())
        grads.append(model[0][3].weight.grad.clone())
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(grads[1], grads[2])


# -- enable_ -----------------------------------------------------------------------------------------------------


def test_an_enabled_model_is_compressed_until_it_is_disabled():
    model = small()
    right = gradients(model, X, None)["3.weight"]
    handle = enable_(model, 4, seed=7)
    first, second = (gradients(model, X, None)["3.weight"] for _ in range(2))
    twin = copy.deepcopy(model)
    assert not torch.equal(first, right)
    assert not torch.equal(first, second)
    assert torch.equal(gradients(twin, X, None)["3.weight"], gradients(model, X, None)["3.weight"])
    handle.remove()
    assert torch.equal(gradients(model, X, None)["3.weight"], right)


def test_an_error_in_the_forward_pass_leaves_nothing_behind():
    model = small()
    enable_(model, 8)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5, 18, 18))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("bits", [0, 3, 16, True, "8"])
def test_other_widths_are_refused(bits):
    with pytest.raises(CompressionError, match="bits"):
        saved_activations(bits)
