"""What is saved by which module, and what an error in a pass says."""

import functools

import pytest
import torch
from torch import nn

from mimicnorm.errors import ExampleError, MemoryPredictionError
from mimicnorm.memory import compare, largest_batch, measure


def mlp():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


class After(nn.Module):
    """A layer and then some function of its output, in the model's own forward."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(8, 3), function

    def forward(self, x):
        return self.function(self.layer(x))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.head = kind(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the fused kernel is oneDNN's")
def test_an_lstm_in_one_fused_kernel_is_refused_on_fake_tensors():
    with pytest.raises(MemoryPredictionError, match=r"module 'body' cannot run .*fused kernel .*fake=False"):
        measure(Recurrent(nn.LSTM), (4, 5, 8))
    assert measure(Recurrent(nn.LSTM), (4, 5, 8), fake=False).by_module()["body"] > 0
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        fake, real = (measure(Recurrent(nn.LSTM), (4, 5, 8), fake=fake).as_dict() for fake in (True, False))
    assert fake == real


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_other_recurrent_layers_save_the_same_fake_and_real(kind):
    fake, real = (measure(Recurrent(kind), (4, 5, 8), fake=fake) for fake in (True, False))
    assert fake.by_module() == real.by_module()
    assert fake.peak_bytes == pytest.approx(real.peak_bytes, rel=0.03)  # a tanh in place or not


@pytest.mark.parametrize("fake", [True, False])
def test_gradients_of_a_loss_module_stay_as_they_were(fake):
    scorer, grad = nn.Linear(3, 1), torch.ones(1, 3)
    scorer.weight.grad = grad
    measure(mlp(), (4, 8), loss=lambda output: scorer(output).sum(), fake=fake)
    assert scorer.weight.grad is grad
    assert grad.tolist() == [[1, 1, 1]]
    assert scorer.bias.grad is None


CRITERION = nn.CrossEntropyLoss()
OUTPUT_ALONE = "the loss fails: TypeError: .*give a function of the model's output alone, loss=lambda output: criterion"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output: output, r"the loss returned a .*of shape \(4, 3\): return a scalar"),
        (lambda output: 1.0, "the loss returned a float: return a scalar"),
        (lambda output: output.detach().sum(), "the loss returned a .*without a gradient: return a scalar"),
        ("ce", OUTPUT_ALONE),
        (CRITERION, OUTPUT_ALONE),
        (torch.compile(CRITERION), OUTPUT_ALONE),
        (functools.partial(nn.functional.mse_loss, reduction="sum"), OUTPUT_ALONE),
        (lambda: 0, OUTPUT_ALONE),
        (lambda output: output.sum() * output.max().item(), "the loss cannot run on fake tensors.*fake=False"),
    ],
)
def test_an_unfit_loss_is_explained(loss, message):
    with pytest.raises(MemoryPredictionError, match=message):
        measure(mlp(), (4, 8), loss=loss)


@pytest.mark.parametrize("loss", [torch.sum, torch.Tensor.sum, lambda output, scale=2: scale * output.mean()])
def test_a_loss_of_any_kind_that_takes_the_output_is_taken(loss):
    assert measure(mlp(), (4, 8), loss=loss).peak_bytes > 0


def test_without_a_loss_every_output_is_trained():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 1)

        def forward(self, x):
            return {"classes": self.a(x), "value": [self.b(x).squeeze(1)]}

    analysis = measure(TwoHeads(), (16, 8))
    assert analysis.gradients == analysis.parameters
    with pytest.raises(MemoryPredictionError, match="no tensor that requires a gradient"):
        measure(After(torch.detach), (4, 8))


class PeeksAtValues(torch.optim.SGD):
    def step(self, closure=None):
        if self.param_groups[0]["params"][0].grad.norm().item() >= 0:
            super().step()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ([1], r"optimizer=\[1\]: use one of 'sgd', 'sgd-momentum', 'adamw', None, or a function"),
        ("adam", "optimizer='adam': use one of "),
        (torch.optim.SGD(mlp().parameters(), lr=1), "optimizer=SGD: use .*a function .*runs on copies"),
        (lambda parameters: torch.optim.SGD(parameters, lr=-1), "making the optimizer fails: .*learning rate"),
        (lambda parameters: None, "returned NoneType"),
        (torch.optim.LBFGS, "the optimizer's step fails: .*closure'$"),
        (PeeksAtValues, "the optimizer's step cannot run on fake tensors.*fake=False"),
    ],
)
def test_an_unfit_optimizer_is_explained(optimizer, message):
    with pytest.raises(MemoryPredictionError, match=message):
        measure(mlp(), (4, 8), optimizer=optimizer)
    if optimizer is PeeksAtValues:
        assert measure(mlp(), (4, 8), optimizer=optimizer, fake=False).peak_bytes > 0


class BreaksBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().item()


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (lambda h: h * float(h.detach().numpy().sum()), "the model"),
        (lambda h: h * h.max().item(), "the model"),
        (lambda h: h[h[:, 0] > 9], "the model"),
        (lambda h: h * float(f"{h[0, 0].detach()}".strip("tensor()")), "the model"),
        (BreaksBackward.apply, "the backward pass"),
    ],
)
def test_what_needs_values_is_offered_a_real_step(function, place):
    with pytest.raises(MemoryPredictionError, match=f"^{place} cannot run on fake tensors, .*fake=False"):
        measure(After(function), (4, 8))
    assert measure(After(function), (4, 8), fake=False).peak_bytes > 0


def test_whatever_offers_a_real_step_has_one():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), After(lambda h: h if h.max().item() < 1e9 else -h))
    for attempt in (compare, lambda m, x, **how: largest_batch(m, x, "64 KiB", **how)):
        with pytest.raises(MemoryPredictionError, match=r"^module '2' .*needs values, not only shapes .*fake=False"):
            attempt(model, (4, 8))
        assert attempt(model, torch.randn(4, 8), fake=False)
    with pytest.raises(ExampleError, match=r"^the model does not run on the example \(\(4, 8\) float32\)"):
        measure(After(lambda h: h.view(-1, 7)), (4, 8), fake=False)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_example_of_the_wrong_shape_is_not_offered_a_real_step(compiled, capfd):
    """Torch logs the traceback of a failed fake kernel, 35 lines, before it raises."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), After(lambda h: h @ h))
    model = torch.compile(model) if compiled else model
    with pytest.raises(ExampleError, match=r"expected input\[4, 5, 8, 8\] to have 3 channels") as caught:
        measure(model, (4, 5, 8, 8))
    assert "fake=False" not in str(caught.value)
    with pytest.raises(ExampleError, match="does not run on the example"):
        measure(After(lambda h: h @ h), (4, 8))
    assert capfd.readouterr().err == ""


def test_an_error_that_the_model_catches_itself_confuses_no_names():
    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.wrong, self.right, self.squash = nn.Linear(5, 3), nn.Linear(8, 3), nn.Tanh()

        def forward(self, x):
            try:
                return self.wrong(x)
            except RuntimeError:
                return self.squash(self.right(x))

    assert set(measure(nn.Sequential(Tries(), nn.Tanh()), (4, 8)).by_module()) == {"0.squash", "1", "(loss)"}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_modules_are_counted_as_one():
    part, head = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 3)
    plain, scripted = (nn.Sequential(body, head) for body in (part, torch.jit.script(part)))
    assert measure(scripted, (4, 8)).by_module() == measure(plain, (4, 8)).by_module(1)
