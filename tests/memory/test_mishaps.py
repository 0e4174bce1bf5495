"""What goes wrong in a measurement: whose fault it is, what to do, and that the caller's tensors stay theirs."""

import functools

import pytest
import torch
from torch import nn

from mimicnorm.cli import main
from mimicnorm.errors import ExampleError, MemoryPredictionError, MimicNormError
from mimicnorm.memory import compare, largest_batch, measure
from mimicnorm.methods import MimicNorm


def mlp():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.head = kind(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


class After(nn.Module):
    """A layer and then some function of its output, in the model's own forward."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(8, 3), function

    def forward(self, x):
        return self.function(self.layer(x))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the fused kernel is oneDNN's")
def test_an_lstm_in_one_fused_kernel_is_refused_on_fake_tensors():
    with pytest.raises(MemoryPredictionError, match=r"module 'body' runs as one fused kernel.*fake=False"):
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


def test_batchnorm_under_autocast_saves_the_same_fake_and_real():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    for affine in (True, False):
        model[1] = nn.BatchNorm2d(8, affine=affine)
        fake, real = (measure(model, (4, 3, 8, 8), autocast=torch.bfloat16, fake=fake) for fake in (True, False))
        assert fake.by_module() == real.by_module()


def test_methods_of_one_name_are_told_apart_by_their_settings():
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    result = compare(model, (4, 64), ["batchnorm", MimicNorm(), MimicNorm(last_norm=False)])
    assert list(result.analyses) == ["batchnorm", "mimicnorm(last_norm=True)", "mimicnorm(last_norm=False)"]
    assert list(compare(model, (4, 64), "mimicnorm").analyses) == ["mimicnorm"]
    with pytest.raises(MemoryPredictionError, match="no method to compare"):
        compare(model, (4, 64), [])
    with pytest.raises(MemoryPredictionError, match="given twice"):
        compare(model, (4, 64), ["nonorm", "batchnorm", "nonorm"])


@pytest.mark.parametrize("fake", [True, False])
def test_gradients_of_a_loss_module_stay_as_they_were(fake):
    scorer, grad = nn.Linear(3, 1), torch.ones(1, 3)
    scorer.weight.grad = grad
    measure(mlp(), (4, 8), loss=lambda output: scorer(output).sum(), fake=fake)
    assert scorer.weight.grad is grad
    assert grad.tolist() == [[1, 1, 1]]
    assert scorer.bias.grad is None


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


def test_a_real_step_leaves_the_input_alone():
    x = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    measure(ChangesItsInput(), (x, x), fake=False)
    assert x.max() == 1
    assert x.grad is None


@pytest.mark.parametrize("fake", [True, False])
def test_inputs_made_in_inference_mode_are_taken(fake):
    with torch.inference_mode():
        x = torch.ones(4, 8)
    assert measure(mlp(), x, fake=fake).as_dict() == measure(mlp(), (4, 8)).as_dict()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output: output, r"shape \(4, 3\): return a scalar"),
        (lambda output: 1.0, " float: return a scalar"),
        (lambda output: output.detach().sum(), "without a gradient.*return a scalar"),
    ],
)
def test_an_unfit_loss_is_explained(loss, message):
    with pytest.raises(MemoryPredictionError, match=f"the loss returned a.*{message}"):
        measure(mlp(), (4, 8), loss=loss)


CRITERION = nn.CrossEntropyLoss()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("ce", "loss='ce': give a function from the model's output"),
        (CRITERION, r"output alone \(.*'target'\): give loss=lambda output: criterion\(output, targets\)"),
        (CRITERION.forward, r"give loss=lambda output: criterion\(output, targets\)"),
        (torch.compile(CRITERION), r"give loss=lambda output: criterion\(output, targets\)"),
        (functools.partial(nn.functional.mse_loss, reduction="sum"), r"give loss=lambda output: criterion"),
        (lambda: 0, "too many positional arguments.*give loss=lambda output"),
    ],
)
def test_a_loss_that_wants_more_than_the_output_is_told_how(loss, message):
    with pytest.raises(MemoryPredictionError, match=message) as caught:
        measure(mlp(), (4, 8), loss=loss)
    assert "fake=False" not in str(caught.value)


@pytest.mark.parametrize("loss", [torch.sum, torch.Tensor.sum, lambda output, scale=2: scale * output.mean()])
def test_a_loss_of_any_kind_that_takes_the_output_is_taken(loss):
    assert measure(mlp(), (4, 8), loss=loss).peak_bytes > 0


@pytest.mark.parametrize("batch", ["8", 2.5, True, 0, -1, [8]])
def test_a_batch_must_count(batch):
    with pytest.raises(MemoryPredictionError, match=r"batch=.*give a whole number of samples from 1 on"):
        measure(mlp(), (4, 8), batch=batch)


def test_what_cannot_be_compared_is_refused_as_it_cannot_be_measured():
    for attempt in (measure, compare):
        with pytest.raises(MemoryPredictionError, match=r"the model is a int: give an nn\.Module"):
            attempt(3, (4, 8))
        for nothing in ((), [], ""):
            with pytest.raises(ExampleError, match="example must be a tensor, a shape"):
                attempt(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nothing)
    with pytest.raises(MimicNormError, match=r"method must be one of .*got 3"):
        compare(mlp(), (4, 8), 3)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_example_of_the_wrong_shape_is_not_offered_the_real_path(compiled):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    with pytest.raises(ExampleError, match=r"expected input\[4, 5, 8, 8\] to have 3 channels") as caught:
        measure(torch.compile(model) if compiled else model, (4, 5, 8, 8))
    assert "fake=False" not in str(caught.value)


class PeeksAtValues(torch.optim.SGD):
    def step(self, closure=None):
        if self.param_groups[0]["params"][0].grad.norm().item() >= 0:
            super().step()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ([1], r"optimizer \[1\] is not known"),
        (torch.optim.SGD(mlp().parameters(), lr=1), "optimizer is SGD made for .*give a function"),
        (lambda parameters: torch.optim.SGD(parameters, lr=-1), "making the optimizer fails: .*learning rate"),
        (lambda parameters: None, "returned NoneType"),
        (torch.optim.LBFGS, "the optimizer's step fails: .*closure'$"),
        (PeeksAtValues, "the optimizer's step fails: .*fake=False"),
    ],
)
def test_an_unfit_optimizer_is_explained(optimizer, message):
    with pytest.raises(MemoryPredictionError, match=message):
        measure(mlp(), (4, 8), optimizer=optimizer)


def test_an_optimizer_that_needs_values_runs_on_real_ones():
    assert measure(mlp(), (4, 8), optimizer=PeeksAtValues, fake=False).peak_bytes > 0


def test_a_model_that_cannot_be_copied_names_what_it_holds():
    model = mlp()
    model[1].last = model[0](torch.ones(2, 8))
    with pytest.raises(MemoryPredictionError, match=r"attribute 'last' of module '1' holds a result of a forward"):
        measure(model, (4, 8), fake=False)


class BreaksBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().item()


def test_a_backward_pass_that_needs_values_offers_the_real_path():
    with pytest.raises(MemoryPredictionError, match=r"the backward pass fails: .*fake=False"):
        measure(After(BreaksBackward.apply), (4, 8))


def test_the_module_still_running_is_blamed_not_the_last_one_that_ran():
    picks = nn.Sequential(nn.Linear(8, 8), After(lambda h: h[h.sum(1) > 0]))
    with pytest.raises(MemoryPredictionError, match=r"^module '1' cannot run on fake tensors"):
        measure(picks, (4, 8))
    with pytest.raises(ExampleError, match=r"^the model does not run on the example"):
        measure(After(lambda h: h.view(-1, 7)), (4, 8), fake=False)


def test_an_error_the_model_catches_itself_confuses_no_names():
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


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h * float(h.detach().numpy().sum()),
        lambda h: h * h.max().item(),
        lambda h: h[h[:, 0] > 9],
        lambda h: h * float(f"{h[0, 0].detach()}".strip("tensor()")),
    ],
)
def test_a_network_that_takes_values_is_offered_the_real_path(function):
    with pytest.raises(MemoryPredictionError, match=r"^the model .*fake=False"):
        measure(After(function), (4, 8))
    assert measure(After(function), (4, 8), fake=False).peak_bytes > 0


def test_whatever_offers_the_real_path_has_it():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), After(lambda h: h if h.max().item() < 1e9 else -h))
    for attempt in (compare, lambda m, x, **how: largest_batch(m, x, "64 KiB", **how)):
        with pytest.raises(MemoryPredictionError, match=r"module '2' .*fake=False"):
            attempt(model, torch.randn(4, 8))
        assert attempt(model, torch.randn(4, 8), fake=False)


def test_real_batches_of_another_size_hold_valid_values():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)

        def forward(self, words):
            return self.head(self.table(words).mean(1))

    words = torch.randint(0, 5, (3, 6))
    assert largest_batch(Words(), words, "16 KiB", fake=False) == largest_batch(Words(), words, "16 KiB") > 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plot", "x.xyz"], "cannot draw to 'x.xyz'"),
        (["--plot", "/no/such/place/x.png"], "there is no directory"),
        (["--optimizer", "lion"], "--optimizer 'lion' is not known: give one of sgd, sgd-momentum, adamw, none"),
        (["--methods", ""], "--methods names no method"),
        (["--device", "gpu"], "--device 'gpu' is not a device: give cpu, cuda or auto"),
        (["--device", "meta"], "--device meta has no memory to predict"),
    ],
)
def test_the_command_refuses_before_it_loads_anything(words, said, capsys, monkeypatch):
    monkeypatch.setattr("mimicnorm.models.find", lambda *_, **__: pytest.fail("the model was loaded"))
    assert main(["memory", "torchvision:resnet18", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
