"""Any loss is exact: a mean over samples in one pass, any other one on the whole batch or refused."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from whole_and_parts import (
    EXACT,
    Classifier,
    Pooled,
    SavedBytes,
    Segmenter,
    Tempered,
    WithFeatures,
    batch,
    check_exact,
    converted,
    dict_loss,
    full_batch,
    gradient,
    relative_error,
    scaled,
    state,
)

from mimicnorm.errors import MicroBatchError
from mimicnorm.layers import LastNorm
from mimicnorm.microbatch import LastNormCrossEntropy, backward

WEIGHT = torch.tensor([0.1, 1.0, 2.0, 4.0, 8.0], dtype=torch.float64)


def info_nce(out: Tensor, targets: Tensor) -> Tensor:
    z = F.normalize(out)
    return F.cross_entropy(z @ z.T / 0.2, torch.arange(len(z)).roll(1))


def supervised_contrastive(out: Tensor, targets: Tensor) -> Tensor:
    """Zero for any two samples."""
    z = F.normalize(out)
    others = torch.eye(len(z), dtype=torch.float64)
    same = (targets[:, None] == targets).double() - others
    return -((z @ z.T / 0.1 - 1e9 * others).log_softmax(1) * same).sum() / len(z)


def spread(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out, targets) + F.relu(2 - (out.var(0, correction=0) + 1e-4).sqrt()).mean()


def hard_examples(out: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(out, targets, reduction="none")
    return losses.topk(max(len(losses) // 2, 1)).values.mean()


def relative(out: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(out, targets)
    return loss / loss.detach()  # always 1: only its gradient differs


def squared(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out, targets).square()


NOT_MEANS = [
    *(info_nce, supervised_contrastive, spread, hard_examples, relative, squared),
    *(
        nn.CrossEntropyLoss(WEIGHT),
        nn.CrossEntropyLoss(WEIGHT).forward,
        functools.partial(F.cross_entropy, weight=WEIGHT),
    ),
    *(nn.CrossEntropyLoss(reduction="sum"), functools.partial(F.cross_entropy, ignore_index=2)),
    lambda out, t: F.cross_entropy(out, t, WEIGHT) + 1e8,
    lambda out, t: (F.cross_entropy(out, t, reduction="none") * WEIGHT[t]).sum() / WEIGHT[t].sum(),
    lambda out, t: F.mse_loss(out[:, :1], t.double()),  # (n, 1) and (n,): each output with all targets
    torch.compile(lambda out, t: F.mse_loss(out, F.one_hot(t, 5).double(), reduction="sum"), backend="eager"),
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using a target size", "ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::mimicnorm.microbatch.RegressionLossWarning"),
]


@pytest.mark.parametrize("micro_batch", [1, 3, 11])
@pytest.mark.parametrize("loss_fn", NOT_MEANS)
def test_a_loss_that_is_not_a_mean_sees_the_whole_batch(loss_fn, micro_batch):
    net = converted(Classifier(), last_norm=False)
    if micro_batch == 3:  # a last BN in eval mode needs one pass, too
        net = converted(Classifier()).eval()
    check_exact(net, loss_fn, *batch(12), micro_batch=micro_batch)


@pytest.mark.parametrize("loss_fn", NOT_MEANS)
@pytest.mark.parametrize("last_norm", [True, False])
def test_it_is_refused_where_it_cannot_see_the_whole_batch(loss_fn, last_norm):
    net = converted(Classifier(), last_norm=last_norm)
    x, y = batch()
    before = state(net)
    wanted = r"not a mean over samples.*micro-batch 0.*Class weights.*denominator=.*leave loss_in_pieces"
    with pytest.raises(MicroBatchError, match=wanted):
        backward(net, loss_fn, x, y, micro_batch=3, loss_in_pieces=True)
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(state(net), before)


class OwnMean(nn.MSELoss):
    """Averages by itself what torch leaves apart."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target).mean()


def mixup(out: Tensor, targets: tuple) -> Tensor:
    a, b, share = targets
    return share * F.cross_entropy(out, a) + (1 - share) * F.cross_entropy(out, b)


CLASSES, SOFT = batch(12)[1], torch.rand(12, 5, dtype=torch.float64).softmax(1)


@pytest.mark.parametrize("micro_batch", [1, 5])
@pytest.mark.parametrize(
    ("loss_fn", "targets"),
    [
        *((F.cross_entropy, CLASSES), (nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES)),
        *((nn.CrossEntropyLoss(WEIGHT), SOFT), (F.cross_entropy, SOFT)),  # class weights of soft targets: a mean
        *((F.mse_loss, SOFT), (nn.HuberLoss().forward, SOFT), (OwnMean(reduction="none"), SOFT)),
        (functools.partial(F.kl_div, reduction="batchmean"), SOFT),
        (lambda out, t: F.cross_entropy(out, t, torch.full_like(WEIGHT, 2)), CLASSES),
        (lambda out, t: F.cross_entropy(out, t["y"].argmax(1)), {"y": torch.eye(5)[CLASSES]}),
        (lambda out, t: F.binary_cross_entropy(out.sigmoid(), t), SOFT),
        (lambda out, t: out.mean() - (out * t).mean(), SOFT),  # cancels
        (mixup, (CLASSES, CLASSES.flip(0), 0.3)),
    ],
)
@pytest.mark.parametrize("last_norm", [False, True])
def test_a_mean_takes_one_pass_without_a_last_norm(loss_fn, targets, micro_batch, last_norm):
    net = converted(Classifier(), last_norm=last_norm)
    calls: list[bool] = []
    net.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    check_exact(net, loss_fn, batch(12)[0], targets, micro_batch=micro_batch)
    pieces = -(-12 // micro_batch)
    assert calls == [True] + [False] * pieces * last_norm + [True] * pieces  # the first is the whole batch's


def test_one_micro_batch_needs_no_comparison():
    calls: list[int] = []
    net = converted(Classifier(), last_norm=False)
    backward(net, lambda out, t: calls.append(len(out)) or info_nce(out, t), *batch(8), micro_batch=8)
    assert calls == [8]


def test_with_a_denominator_the_loss_has_to_be_a_sum():
    net = converted(Classifier(), last_norm=False)
    x, y = batch()
    for loss_fn in (F.cross_entropy, info_nce):  # a mean, divided once more
        whole, loss = full_batch(net, loss_fn, x, y)
        part = copy.deepcopy(net)
        torch.testing.assert_close(backward(part, loss_fn, x, y, micro_batch=5, denominator=3.0), loss / 3)
        for p in whole.parameters():
            p.grad /= 3
        assert relative_error(part, whole) <= EXACT
        with pytest.raises(MicroBatchError, match=r"not a sum over samples.*With denominator="):
            backward(net, loss_fn, x, y, micro_batch=5, denominator=3.0, loss_in_pieces=True)


def test_a_loss_with_noise_for_each_sample_cannot_be_compared():
    def noisy(out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.dropout(out, 0.5), targets)

    net = converted(Classifier(), last_norm=False)
    x, y = batch()
    whole = copy.deepcopy(net)
    torch.manual_seed(3)
    noisy(whole(x), y).backward()
    torch.manual_seed(3)
    backward(net, noisy, x, y, micro_batch=5)
    assert relative_error(net, whole) <= EXACT, "so it sees the whole batch"
    backward(net, noisy, x, y, micro_batch=5, loss_in_pieces=True)  # the user's word counts


def test_targets_and_outputs_that_cannot_be_joined():
    """Images of two sizes, and a share of mixup for each micro-batch: a mean all the same."""

    class Dense(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.body(x).movedim(1, -1)).movedim(-1, 1)

    def dense_mixup(out: Tensor, targets: tuple) -> Tensor:
        return targets[1] * F.cross_entropy(out, targets[0]) + (1 - targets[1]) * out.logsumexp(1).mean()

    net = converted(Classifier(), run_as=Dense, last_norm=False)
    loader = [
        (torch.randn(2, 3, s, s, dtype=torch.float64), (torch.randint(5, (2, t, t)), 0.1 + 0.2 * i))
        for i, (s, t) in enumerate([(9, 4), (11, 5), (9, 4)])
    ]
    whole = copy.deepcopy(net)
    for x, targets in loader:
        (dense_mixup(whole(x), targets) / 3).backward()
    backward(net, dense_mixup, loader)
    assert relative_error(net, whole) <= EXACT
    with pytest.raises(MicroBatchError) as caught:  # a loss that compares samples has no whole batch to see
        backward(net, lambda out, t: spread(out.mean((2, 3)), t[0][:, 0, 0]), loader)
    assert "loss_fn must see the whole batch" in " ".join(caught.value.__notes__)


# -- one micro-batch at a time -----------------------------------------------------------------------------------


def test_no_outputs_of_the_whole_batch_are_saved():
    net = converted(Segmenter())
    x, y = batch(64)[0], torch.randint(4, (64, 9, 9))
    peaks = []
    for in_pieces in (False, True):
        with (saved := SavedBytes([*net.parameters(), *net.buffers(), x, y])):
            backward(net, dict_loss, x, y, micro_batch=1, loss_in_pieces=in_pieces)
        assert saved.now == 0
        peaks.append(saved.peak)
    raw_logits = 64 * 2 * 4 * 4 * 4 * 8  # of two heads, four classes, 4 x 4 pixels
    assert peaks[1] < raw_logits + peaks[0] / 16


def test_a_loss_that_changes_is_noticed():
    calls: list[int] = []

    def drifting(out: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        return F.cross_entropy(out, targets) * len(calls)

    with pytest.raises(MicroBatchError, match="keeps a state outside of modules"):
        backward(converted(Classifier()), drifting, *batch(8), micro_batch=3, loss_in_pieces=True)


# -- a last BN inside the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap", [lambda loss: loss, functools.partial, lambda loss: loss.forward, lambda loss: lambda out, t: loss(out, t)]
)
def test_a_last_norm_of_the_loss_sees_the_whole_batch(wrap):
    net, loss_fn = converted(Classifier(), last_norm=False), scaled(LastNormCrossEntropy(5).double())
    x, y = batch()
    reference = copy.deepcopy(loss_fn)
    whole, _ = full_batch(net, reference, x, y)
    right = gradient(whole, reference)
    with pytest.raises(MicroBatchError, match="must see it whole"):
        backward(net, wrap(loss_fn), x, y, micro_batch=3, loss_in_pieces=True)
    assert loss_fn.last_norm.num_batches_tracked == 0
    logits = backward(net, wrap(loss_fn), x, y, micro_batch=5, return_outputs=True)[1]
    assert float((gradient(net, loss_fn) - right).norm() / right.norm()) <= EXACT
    torch.testing.assert_close(state(loss_fn), state(reference))
    torch.testing.assert_close(logits, whole(x).detach())


def test_a_last_norm_that_is_made_inside_the_loss():
    def hidden(out: Tensor, targets: Tensor) -> Tensor:
        return LastNormCrossEntropy(5).double()(out, targets)

    x, y = batch(8)
    for last_norm in (True, False):
        net = converted(Classifier(), last_norm=last_norm)
        with pytest.raises(MicroBatchError, match=r"one micro-batch at a time.*the module itself"):
            backward(net, hidden, x, y, micro_batch=3, loss_in_pieces=True)
        assert all(p.grad is None for p in net.parameters())
    check_exact(net, hidden, x, y, micro_batch=3)


# -- what else a loss does ---------------------------------------------------------------------------------------


class ArcFace(nn.Module):
    """A classifier inside the loss, with class weights: parameters of its own, and not a mean."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, inputs, dtype=torch.float64))

    def forward(self, out: tuple, targets: Tensor) -> Tensor:
        return F.cross_entropy(4 * F.linear(F.normalize(out[1]), F.normalize(self.weight)), targets, WEIGHT)


@pytest.mark.parametrize(
    "how", [{"last_norm": True}, {"last_norm": False}, {"last_norm": True, "loss_in_pieces": True}]
)
@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: lambda out, t: loss(out, t)])
def test_parameters_of_the_loss_get_their_gradient(how, wrap):
    in_pieces = how.get("loss_in_pieces")
    for make, loss_fn in ((WithFeatures, ArcFace(12)), (Classifier, Tempered()))[bool(in_pieces) :]:
        net, own = converted(make(), last_norm=how["last_norm"]), copy.deepcopy(loss_fn)
        net.fc.requires_grad_(make is Classifier)  # the logits are not used
        x, y = batch()
        whole, _ = full_batch(net, own, x, y)
        backward(net, wrap(loss_fn), x, y, micro_batch=5, loss_in_pieces=in_pieces)
        assert relative_error(net, whole) <= EXACT
        loss_fn.zero_grad()
        backward(net.requires_grad_(False), wrap(loss_fn), x, y, micro_batch=5, loss_in_pieces=in_pieces)
        for p, q in zip(loss_fn.parameters(), own.parameters(), strict=True):  # a calibration: only the loss learns
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=0)


def test_a_penalty_over_the_model_s_parameters():
    x, y = batch()
    nets = [converted(Classifier())]
    nets.append(copy.deepcopy(nets[0]))

    def loss_of(net: nn.Module):
        return lambda out, t: F.cross_entropy(out, t) + 0.1 * sum(p.square().sum() for p in net.parameters())

    loss_of(nets[0])(nets[0](x), y).backward()
    backward(nets[1], loss_of(nets[1]), x, y, micro_batch=5)
    assert relative_error(nets[1], nets[0]) <= EXACT


def test_targets_that_require_a_gradient():
    net = converted(Classifier())
    x, soft = batch()[0], torch.randn(32, 5, dtype=torch.float64, requires_grad=True)

    def loss_fn(out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out, targets.softmax(1))

    full_batch(net, loss_fn, x, soft)
    expected, soft.grad = soft.grad, None
    backward(net, loss_fn, x, soft, micro_batch=5)
    torch.testing.assert_close(soft.grad, expected)


@pytest.mark.parametrize("make", [Classifier, Pooled])
@pytest.mark.parametrize("last_norm", [True, False])
def test_a_loss_that_writes_into_the_outputs(make, last_norm):
    def loss_fn(out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out.div_(0.3), targets)

    check_exact(converted(make(), last_norm=last_norm), loss_fn, *batch(), micro_batch=5, return_outputs=True)


def test_complex_outputs():
    class Spectrum(Classifier):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.body(x).mean((2, 3))
            return self.fc(y), torch.complex(y, y * y)

    def loss_fn(out: tuple, targets: Tensor) -> Tensor:
        return F.cross_entropy(out[0], targets) + out[1].abs().square().mean()

    check_exact(converted(Classifier(), run_as=Spectrum), loss_fn, *batch(), micro_batch=5)


def test_hooks_on_a_last_norm_run_once():
    x, y = batch()
    for register in (
        lambda m: m.register_forward_hook(lambda _m, _i, out: out * 2),
        lambda m: m.register_forward_pre_hook(lambda _m, args: (args[0] ** 3,)),
        lambda m: m.register_full_backward_hook(lambda _m, gi, _go: (gi[0] * 2,)),
    ):
        nets = [converted(Classifier())]
        nets.append(copy.deepcopy(nets[0]))
        for net in nets:
            register(next(m for m in net.modules() if isinstance(m, LastNorm)))
        F.cross_entropy(nets[0](x), y).backward()
        backward(nets[1], F.cross_entropy, x, y, micro_batch=5)
        assert float((gradient(nets[1]) - gradient(nets[0])).norm() / gradient(nets[0]).norm()) <= EXACT
