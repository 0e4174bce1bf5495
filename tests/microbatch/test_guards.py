"""What would make the gradient silently wrong is an error that names the place and the remedy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from whole_and_parts import (
    EXACT,
    AveragedHeads,
    Chained,
    Classifier,
    Counts,
    batch,
    converted,
    full_batch,
    relative_error,
    state,
)

from mimicnorm.errors import CheckError, MicroBatchError
from mimicnorm.layers import LastNorm
from mimicnorm.microbatch import LastNormCrossEntropy, backward
from mimicnorm.microbatch.guards import heads_of


def fails(net: nn.Module, *words: str, loss_fn=F.cross_entropy, error: type = MicroBatchError, x=None, **kw) -> None:
    """The call is refused with these words, and no gradient, statistic or random number has moved."""
    inputs, y = batch(8)
    norms = [m for m in net.modules() if isinstance(m, LastNorm)]
    for norm in norms:
        norm.running_mean.fill_(0.3)
    before, places = state(*norms), [b.data_ptr() for norm in norms for b in norm.buffers()]
    with pytest.raises(error) as caught:
        backward(net, loss_fn, inputs if x is None else x, y, **{"micro_batch": 3, **kw})
    for word in words:
        assert word in str(caught.value)
    assert all(p.grad is None for p in net.parameters())
    assert all(p.requires_grad for p in net.parameters())
    assert torch.equal(before, state(*norms))
    assert places == [b.data_ptr() for norm in norms for b in norm.buffers()], "in place: others may hold them"
    assert all(m.intercept is None for m in norms)


def test_heads_are_named_by_the_layer_they_stand_in():
    assert list(heads_of(converted(AveragedHeads()))) == ["fc", "second"]
    assert list(heads_of(nn.Sequential(nn.Linear(3, 2), LastNorm(2)))) == ["1"]
    assert heads_of(converted(Classifier()).eval()) == {}


def test_a_batch_norm_in_training_mode():
    fails(Classifier().double(), "body.1 (BatchNorm2d), body.5 (BatchNorm2d)", "mimicnorm.convert_", ".eval()")
    frozen = Classifier().double()
    frozen.body.eval()
    x, y = batch(8)
    backward(frozen, F.cross_entropy, x, y, micro_batch=3)
    no_statistics = nn.BatchNorm1d(243, track_running_stats=False)  # mixes in eval mode, too
    fails(nn.Sequential(nn.Flatten(), no_statistics, nn.Linear(243, 5)).double().eval(), "1 (BatchNorm1d)")
    fails(nn.SyncBatchNorm.convert_sync_batchnorm(converted(Classifier())), "fc.last_norm", error=ValueError)
    fails(nn.DataParallel(converted(Classifier())), "DistributedDataParallel")


class Moves(Classifier):
    def __init__(self, replace: bool = False):
        super().__init__()
        self.replace = replace
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.replace:
            self.seen = self.seen + 1
        else:
            self.seen += 1
        return super().forward(x) * (1 + self.seen)


@pytest.mark.parametrize("replace", [False, True])
def test_a_buffer_that_changes(replace):
    for last_norm in (True, False):  # two passes, one pass
        net = converted(Moves(replace), last_norm=last_norm)
        fails(net, "seen", "micro-batch 0 (samples 0 to 2)", "eval mode")
    spectral = converted(Classifier())
    nn.utils.parametrizations.spectral_norm(spectral.body[4])
    fails(spectral, "body.4.parametrizations.weight.0._u")


def test_a_lost_last_norm():
    net = converted(Classifier())
    net.fc = nn.Linear(12, 5).double()
    fails(net, "fc", "LastNorm is gone", error=CheckError)


@pytest.mark.parametrize("value", [float("nan"), 1e308])
def test_logits_that_are_not_finite_are_reported_with_their_micro_batch(value):
    x = batch(8)[0]
    x[7] = value
    fails(converted(Classifier()), "logits in micro-batch 2 (samples 6 to 7)", x=x)
    with pytest.raises(MicroBatchError, match=r"(?s)logits in micro-batch 2 .*have been added: clear them"):
        backward(converted(Classifier(), last_norm=False), F.cross_entropy, x, batch(8)[1], micro_batch=3)


@pytest.mark.parametrize("last_norm", [True, False])
def test_an_optimizer_that_steps_in_a_gradient_hook(last_norm):
    net = converted(Classifier(), last_norm=last_norm)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.fc.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    message = r"fc.weight.*: the backward pass of micro-batch 0 .* changed this parameter.*have been added: clear them"
    with pytest.raises(MicroBatchError, match=f"(?s){message}"):
        backward(net, F.cross_entropy, *batch(8), micro_batch=3)


class OwnRandomness(Classifier):
    """Features without a LastNorm, with noise from a generator that nobody sets back."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "generator"):
            self.generator = torch.Generator().manual_seed(0)
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return super().forward(x + 0.001 * noise)


class Clamps(Classifier):
    """A tail that depends on the values, which are small before the LastNorm and large after it."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.fc(self.body(x).mean((2, 3)) * 0.05)
        return out.clamp(max=0.5) if out.max() > 0.5 else out


class Recomputed(Classifier):
    """A shared head inside a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        views = y.mean((2, 3)), y.amax((2, 3))
        return sum(checkpoint(self.fc, v, use_reentrant=True) for v in views)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of the pass without a graph
@pytest.mark.parametrize(
    ("run_as", "how", "message"),
    [
        (Counts, {}, r"fc: the logits of micro-batch 0 .* differed by .*clear them"),
        (OwnRandomness, {"dtype": torch.float32}, "fc: the logits"),  # a small drift in single precision
        (OwnRandomness, {"last_norm": False}, r"output 0 of the model: .* micro-batch 0 .* differed by .*clear them"),
        (Clamps, {}, r"output 0 of the model: .*branches on values"),
        (Recomputed, {}, r"fc: this head is called several times .* checkpoint"),
    ],
)
def test_a_model_that_does_something_else_when_it_runs_again(run_as, how, message):
    net = converted(Classifier(), run_as=run_as, **how)
    nn.init.zeros_(net.fc.bias)
    loss_fn = F.cross_entropy if how.get("last_norm", True) else LastNormCrossEntropy(5).double()
    with pytest.raises(MicroBatchError, match=message):
        backward(net, loss_fn, *batch(8, how.get("dtype", torch.float64)), micro_batch=3)


class Shifts(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sub_(1.0))


@pytest.mark.parametrize("last_norm", [True, False])
def test_a_model_that_writes_into_its_inputs(last_norm):
    net = converted(Classifier(), run_as=Shifts, last_norm=last_norm)
    loss_fn = F.cross_entropy if last_norm else LastNormCrossEntropy(5).double()
    fails(net, "micro-batch 0", "writes into its inputs", loss_fn=loss_fn)


def test_it_may_do_so_in_one_pass():
    net = converted(Classifier(), last_norm=False)
    x, y = batch(8)
    whole, _ = full_batch(net, F.cross_entropy, x - 1, y)
    net.__class__ = Shifts
    backward(net, lambda out, t: F.cross_entropy(out, t), x, y, micro_batch=3)
    assert relative_error(net, whole) <= EXACT


def test_masks_in_the_outputs_are_no_difference():
    class Masked(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_fill(torch.tensor([0, 0, 0, 0, 1]).bool(), float("-inf"))

    x, y = batch(8)
    backward(converted(Classifier(), run_as=Masked), F.cross_entropy, x, y % 4, micro_batch=3)


def test_a_head_that_some_samples_pass_by():
    class Skips(AveragedHeads):
        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x).mean((2, 3))
            return self.fc(y) + self.second(y) if x.shape[0] == 3 or self.training is None else self.fc(y)

    fails(converted(AveragedHeads(), run_as=Skips), "second: called a different number of times in micro-batch 2")


def test_a_head_behind_a_head():
    message = "second: the logits of this head depend on the normalised output of another LastNorm"
    fails(converted(AveragedHeads(), run_as=Chained), message)


def test_a_whole_batch_of_one_sample():
    net = converted(Classifier())
    x, y = batch(1)
    losses = {"loss_fn": F.cross_entropy}, {"loss_fn": F.cross_entropy, "loss_in_pieces": True}
    for case in (
        *losses,
        {"loss_fn": LastNormCrossEntropy(5).double(), "model": converted(Classifier(), last_norm=False)},
    ):
        with pytest.raises(MicroBatchError, match=r"single value per class.*two samples or more") as caught:
            backward(**{"model": net, "inputs": x, "targets": y, "micro_batch": 1} | case)
        assert "give it whole to" not in str(caught.value)
    with pytest.raises(MicroBatchError, match=r"single value per class.*give it whole to mimicnorm.microbatch"):
        net(x)


class WithAux(Classifier):
    """The logits, and beside them what ``aux`` makes of them."""

    def forward(self, x: Tensor) -> tuple:
        out = super().forward(x)
        return out, *self.aux(out)


def first_of_two(out: tuple, targets: Tensor) -> Tensor:
    return F.cross_entropy(out[0], targets)


SIZES = r"different shape in some micro-batches \(\(3,\) and \(2,\) per sample"


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        (lambda out: out.mean(), r"output 1 of the model has shape \(\) for micro-batch 0"),
        (lambda out: out[:2], r"output 1 of the model has shape \(2, 5\) for micro-batch 0"),
        (lambda out: out[:, : len(out)], SIZES),
        (lambda out: out if len(out) == 3 else None, "a Tensor in the first micro-batch and a NoneType in"),
    ],
)
@pytest.mark.parametrize("how", [{}, {"loss_in_pieces": True}, {"last_norm": False}])
def test_outputs_that_cannot_be_joined(aux, message, how):
    net = converted(Classifier(), run_as=WithAux, last_norm=how.get("last_norm", True))
    net.aux = lambda out: [aux(out)]
    settings = {"micro_batch": 3, "loss_in_pieces": how.get("loss_in_pieces")}
    x, y = batch(8)
    with pytest.raises(MicroBatchError, match=message):
        backward(net, first_of_two, x, y, return_outputs=True, **settings)
    if how.get("last_norm") is False or how.get("loss_in_pieces"):
        backward(net, first_of_two, x, y, **settings)  # not asked for, they are nobody's business


def disk_full(_out: Tensor) -> Tensor:
    raise OSError("no space left")


@pytest.mark.parametrize(("fault", "error"), [(lambda out: out * float("nan"), MicroBatchError), (disk_full, OSError)])
def test_a_fault_behind_the_first_micro_batch_tells_of_the_gradients_before(fault, error):
    class Fails(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if len(x) == 3 else fault(x)

    net = converted(Classifier(), run_as=Fails, last_norm=False)
    with pytest.raises(error) as caught:
        backward(net, F.cross_entropy, *batch(8), micro_batch=3)
    told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "Gradients of this batch have been added: clear them" in told


@pytest.mark.parametrize(
    ("fault", "error"),
    [(torch.square, MicroBatchError), (lambda _: torch.zeros(()), MicroBatchError), (disk_full, OSError)],
)
def test_a_loss_that_fails_for_some_sizes_is_noticed_before_a_gradient_is_added(fault, error):
    def loss_fn(out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out, targets) if len(out) == 3 else fault(out)

    fails(converted(Classifier(), last_norm=False), loss_fn=loss_fn, error=error)


@pytest.mark.parametrize("in_pieces", [True, None])
@pytest.mark.parametrize(
    ("loss_fn", "error", "words"),
    [
        (lambda out, t: F.cross_entropy(out, t) * float("nan"), MicroBatchError, "the loss is nan"),
        (lambda out, t: disk_full(out), OSError, "no space left"),
        (nn.CrossEntropyLoss(reduction="none"), MicroBatchError, "loss_fn must return one number"),
        (lambda out, t: F.cross_entropy(out.detach(), t), MicroBatchError, "nothing that requires a gradient"),
    ],
)
def test_a_loss_that_fails(loss_fn, error, words, in_pieces):
    fails(converted(AveragedHeads()), words, loss_fn=loss_fn, error=error, loss_in_pieces=in_pieces)


@pytest.mark.parametrize(
    "wrong",
    [
        *(0, torch.zeros(()), lambda t: 0.0, float("nan"), float("inf"), -1, torch.tensor(float("inf")), "thirteen"),
        *("3", lambda t: t.double(), lambda t: None, True, 1j, torch.tensor(True)),
    ],
)
def test_denominators_that_are_not_positive_numbers(wrong):
    fails(converted(Classifier()), "denominator=", loss_fn=nn.CrossEntropyLoss(reduction="sum"), denominator=wrong)


def test_nothing_to_train():
    net = converted(Classifier()).requires_grad_(False)
    with pytest.raises(MicroBatchError, match="nothing that requires a gradient"):
        backward(net, F.cross_entropy, *batch(8), micro_batch=3)


def test_arguments_of_another_kind():
    net = converted(Classifier())
    x, y = batch(8)
    for model, loss_fn, scaler in ((net.forward, F.cross_entropy, None), (net, None, None), (net, F.cross_entropy, 2)):
        with pytest.raises(MicroBatchError, match="must be a module, a function and"):
            backward(model, loss_fn, x, y, micro_batch=3, scaler=scaler)
