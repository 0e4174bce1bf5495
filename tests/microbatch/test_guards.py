"""What would make the gradient silently wrong is an error that names the place and the remedy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from whole_and_parts import AveragedHeads, Classifier, batch, converted, state

from mimicnorm.errors import CheckError, MicroBatchError
from mimicnorm.layers import LastNorm
from mimicnorm.microbatch import LastNormCrossEntropy, backward
from mimicnorm.microbatch.guards import heads_of


def fails(net: nn.Module, *words: str, loss_fn=F.cross_entropy, error: type = MicroBatchError, x=None, **kw) -> None:
    """The call is refused with these words, and no gradient, statistic or random number has moved."""
    inputs, y = batch(8)
    before = state(*(m for m in net.modules() if isinstance(m, LastNorm)))
    with pytest.raises(error) as caught:
        backward(net, loss_fn, inputs if x is None else x, y, **{"micro_batch": 3, **kw})
    for word in words:
        assert word in str(caught.value)
    assert all(p.grad is None for p in net.parameters())
    assert all(p.requires_grad for p in net.parameters())
    assert torch.equal(before, state(*(m for m in net.modules() if isinstance(m, LastNorm))))
    assert all(m.intercept is None for m in net.modules() if isinstance(m, LastNorm))


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


def test_a_batch_norm_without_statistics_mixes_in_eval_mode_too():
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(243, track_running_stats=False), nn.Linear(243, 5)).double()
    fails(net.eval(), "1 (BatchNorm1d)")


def test_a_last_norm_turned_into_a_synchronised_batch_norm():
    net = nn.SyncBatchNorm.convert_sync_batchnorm(converted(Classifier()))
    fails(net, "fc.last_norm", error=ValueError)


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


def test_spectral_norm_is_noticed_by_its_buffers():
    net = converted(Classifier())
    nn.utils.parametrizations.spectral_norm(net.body[4])
    fails(net, "body.4.parametrizations.weight.0._u")


def test_a_lost_last_norm():
    net = converted(Classifier())
    net.fc = nn.Linear(12, 5).double()
    fails(net, "fc", "LastNorm is gone", error=CheckError)


def test_nan_logits_are_reported_with_their_micro_batch():
    x = batch(8)[0]
    x[7] = float("nan")
    fails(converted(Classifier()), "fc: NaN logits in micro-batch 2 (samples 6 to 7)", x=x)
    x[7] = 1e308
    fails(converted(Classifier()), "micro-batch 2", x=x)


def test_nan_logits_in_one_pass():
    net = converted(Classifier(), last_norm=False)
    x, y = batch(8)
    x[4] = float("nan")
    with pytest.raises(MicroBatchError, match=r"(?s)NaN logits in micro-batch 1 .*have been added: clear them"):
        backward(net, F.cross_entropy, x, y, micro_batch=3)


def test_state_outside_of_buffers_is_noticed_by_the_logits():
    class Counts(Classifier):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x * torch.linspace(1, 2 + self.calls, 9, dtype=x.dtype))

    net = converted(Counts())
    x, y = batch(8)
    with pytest.raises(MicroBatchError, match=r"fc: the logits of micro-batch 0 .* differed by .*clear them"):
        backward(net, F.cross_entropy, x, y, micro_batch=3)


class OwnRandomness(Classifier):
    """Features without a LastNorm, with noise from a generator that nobody sets back."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "generator"):
            self.generator = torch.Generator().manual_seed(0)
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return super().forward(x + 0.001 * noise)


def test_outputs_that_differ_the_second_time():
    net = converted(Classifier(), last_norm=False)
    net.__class__ = OwnRandomness
    x, y = batch(8)
    with pytest.raises(MicroBatchError, match=r"output 0 of the model: .* micro-batch 0 .* differed by .*clear them"):
        backward(net, LastNormCrossEntropy(5).double(), x, y, micro_batch=3)


def test_a_small_drift_of_the_logits_is_noticed_in_single_precision():
    net = converted(Classifier(), torch.float32)
    net.__class__ = OwnRandomness
    x, y = batch(8, torch.float32)
    with pytest.raises(MicroBatchError, match="fc: the logits"):
        backward(net, F.cross_entropy, x, y, micro_batch=3)


def test_a_tail_that_depends_on_the_values():
    class Clamps(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out.clamp(max=0.5) if out.max() > 0.5 else out

    net = converted(Classifier())
    with torch.no_grad():
        net.fc.weight.mul_(0.05)  # small before the LastNorm, large after it
        net.fc.bias.zero_()
    net.__class__ = Clamps
    x, y = batch(8)
    with pytest.raises(MicroBatchError, match=r"output 0 of the model: .*branches on values"):
        backward(net, F.cross_entropy, x, y, micro_batch=3)


@pytest.mark.parametrize("last_norm", [True, False])
def test_a_model_that_writes_into_its_inputs(last_norm):
    class Shifts(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sub_(1.0))

    net = converted(Classifier(), last_norm=last_norm)
    net.__class__ = Shifts
    loss_fn = F.cross_entropy if last_norm else LastNormCrossEntropy(5).double()
    fails(net, "micro-batch 0", "writes into its inputs", loss_fn=loss_fn)


def test_masks_in_the_outputs_are_no_difference():
    class Masked(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_fill(torch.tensor([0, 0, 0, 0, 1]).bool(), float("-inf"))

    net = converted(Classifier())
    net.__class__ = Masked
    x, y = batch(8)
    backward(net, F.cross_entropy, x, y % 4, micro_batch=3)


def test_a_head_that_some_samples_pass_by():
    class Skips(AveragedHeads):
        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x).mean((2, 3))
            return self.fc(y) + self.second(y) if x.shape[0] == 3 or self.training is None else self.fc(y)

    net = AveragedHeads()
    net = converted(net)
    net.__class__ = Skips
    fails(net, "second: called a different number of times in micro-batch 2")


def test_a_head_behind_a_head():
    class Chained(AveragedHeads):
        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x).mean((2, 3))
            return self.second(y + self.fc(y).mean(1, keepdim=True))

    net = converted(AveragedHeads())
    net.__class__ = Chained
    x, y = batch(8)
    with pytest.raises(MicroBatchError, match=r"second: the logits of this head depend on .* another LastNorm"):
        backward(net, F.cross_entropy, x, y, micro_batch=3)
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of the pass without a graph
def test_a_shared_head_inside_a_checkpoint():
    class Recomputed(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x)
            views = y.mean((2, 3)), y.amax((2, 3))
            return sum(torch.utils.checkpoint.checkpoint(self.fc, v, use_reentrant=True) for v in views)

    net = converted(Classifier())
    net.__class__ = Recomputed
    x, y = batch(8)
    with pytest.raises(MicroBatchError, match=r"fc: this head is called several times .* checkpoint"):
        backward(net, F.cross_entropy, x, y, micro_batch=3)


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


@pytest.mark.parametrize(
    ("aux", "words"),
    [
        (lambda out: [out.mean()], ["output 1 of the model has shape ()", "micro-batch 0"]),
        (lambda out: [out[:2]], ["output 1 of the model has shape (2, 5)", "micro-batch 0"]),
    ],
)
@pytest.mark.parametrize("how", [{"last_norm": False}, {"loss_in_pieces": True}])
def test_outputs_that_cannot_be_returned_whole(aux, words, how):
    net = converted(Classifier(), last_norm=how.get("last_norm", True))
    net.__class__, net.aux = WithAux, aux
    pieces = {"loss_in_pieces": how.get("loss_in_pieces")}

    def loss_fn(out: tuple, targets: Tensor) -> Tensor:
        return F.cross_entropy(out[0], targets)

    fails(net, *words, loss_fn=loss_fn, return_outputs=True, **pieces)
    x, y = batch(8)
    backward(net, loss_fn, x, y, micro_batch=3, **pieces)  # not asked for, they are nobody's business


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        (lambda out: [out] * (len(out) - 1), r"output\[2\] is in the first micro-batch, but not in micro-batch 2"),
        (lambda out: [out[:, : len(out)]], r"different shape in some micro-batches \(\(3,\) and \(2,\) per sample"),
        (lambda out: [out if len(out) == 3 else None], "a Tensor in the first micro-batch and a NoneType in"),
    ],
)
def test_outputs_that_differ_between_micro_batches(aux, message):
    x, y = batch(8)
    for last_norm, added in ((True, ""), (False, ".*have been added: clear them")):
        net = converted(Classifier(), last_norm=last_norm)
        net.__class__, net.aux = WithAux, aux
        with pytest.raises(MicroBatchError, match=f"(?s){message}{added}"):
            backward(net, lambda out, t: F.cross_entropy(out[0], t), x, y, micro_batch=3, return_outputs=True)


def disk_full(_out: Tensor) -> Tensor:
    raise OSError("no space left")


@pytest.mark.parametrize(("fault", "error"), [(lambda out: out * float("nan"), MicroBatchError), (disk_full, OSError)])
def test_a_fault_behind_the_first_micro_batch_tells_of_the_gradients_before(fault, error):
    class Fails(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if len(x) == 3 else fault(x)

    x, y = batch(8)
    net = converted(Classifier(), last_norm=False)
    net.__class__ = Fails
    with pytest.raises(error) as caught:
        backward(net, F.cross_entropy, x, y, micro_batch=3)
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


def test_data_parallel_is_refused():
    fails(nn.DataParallel(converted(Classifier())), "DistributedDataParallel")


def test_losses_that_are_not_one_number():
    net = converted(Classifier())
    x, y = batch(8)
    with pytest.raises(MicroBatchError, match=r"loss_fn must return one number.*\(8,\)"):
        backward(net, nn.CrossEntropyLoss(reduction="none"), x, y, micro_batch=3)
    numbers = (0, torch.zeros(()), lambda t: 0.0, float("nan"), float("inf"), -1, torch.tensor(float("inf")))
    for wrong in (*numbers, "thirteen", "3", lambda t: t.double(), lambda t: None, True, 1j, torch.tensor(True)):
        with pytest.raises(MicroBatchError, match="denominator="):
            backward(net, nn.CrossEntropyLoss(reduction="sum"), x, y, micro_batch=3, denominator=wrong)


def test_arguments_of_another_kind():
    net = converted(Classifier())
    x, y = batch(8)
    for model, loss_fn, scaler in ((net.forward, F.cross_entropy, None), (net, None, None), (net, F.cross_entropy, 2)):
        with pytest.raises(MicroBatchError, match="must be a module, a function and"):
            backward(model, loss_fn, x, y, micro_batch=3, scaler=scaler)


def test_nothing_to_train():
    net = converted(Classifier()).requires_grad_(False)
    x, y = batch(8)
    with pytest.raises(MicroBatchError, match="nothing that requires a gradient"):
        backward(net, F.cross_entropy, x, y, micro_batch=3)
