"""The gradient is that of the whole batch, for every kind of network, loss and input."""

from __future__ import annotations

import copy
import os
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from whole_and_parts import (
    EXACT,
    AveragedHeads,
    Classifier,
    Pooled,
    SavedBytes,
    Segmenter,
    SharedHead,
    WithFeatures,
    batch,
    check_exact,
    check_replay,
    converted,
    dict_loss,
    feature_loss,
    full_batch,
    gradient,
    one_graph,
    relative_error,
    state,
    two_view_loss,
)

import mimicnorm as mn
from mimicnorm.microbatch import backward

MICRO_BATCHES = (1, 2, 3, 7, 16, 32, 50)


def resnet18() -> nn.Module:
    return zoo.torchvision().models.resnet18(num_classes=5)


def vgg() -> nn.Module:
    vgg = zoo.torchvision().models.vgg
    net = vgg.VGG(vgg.make_layers([8, "M", 16, 16, "M", 16, "M"], batch_norm=True), init_weights=False)
    net.avgpool = nn.AdaptiveAvgPool2d(1)
    net.classifier = nn.Sequential(nn.Linear(16, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 5))
    return net


def shufflenet() -> nn.Module:
    return zoo.torchvision().models.ShuffleNetV2([4, 8, 4], [24, 32, 64, 128, 128], num_classes=5)


def efficientnet() -> nn.Module:
    models = zoo.torchvision().models.efficientnet
    blocks, last = models._efficientnet_conf("efficientnet_b0", width_mult=0.25, depth_mult=1.0)
    return models.EfficientNet(blocks, dropout=0.2, stochastic_depth_prob=0.2, last_channel=last, num_classes=5)


ZOO = [(resnet18, 7), (vgg, 3), (vgg, 1), (shufflenet, 2), (efficientnet, 7)]


def without_randomness(net: nn.Module) -> nn.Module:
    for m in net.modules():
        if "dropout" in type(m).__name__.lower() or "stochastic" in type(m).__name__.lower():
            m.p = 0.0
    return net


@pytest.mark.parametrize("micro_batch", MICRO_BATCHES)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, EXACT), (torch.float32, 1e-5)])
def test_gradient_loss_and_statistics_are_those_of_the_whole_batch(micro_batch, dtype, allowed):
    net = converted(Classifier(), dtype)
    check_exact(net, F.cross_entropy, *batch(dtype=dtype), allowed, micro_batch=micro_batch)


def test_plain_accumulation_is_far_off():
    net = converted(Classifier())
    x, y = batch()
    whole, _ = full_batch(net, F.cross_entropy, x, y)
    norm = net.fc.last_norm
    norm._accumulation.active = False
    for a, b in zip(x.split(4), y.split(4), strict=True):
        (F.cross_entropy(net(a), b) / 8).backward()
    assert relative_error(net, whole) > 0.1


@pytest.mark.parametrize(("make", "micro_batch"), ZOO)
def test_real_networks(make, micro_batch):
    net = without_randomness(make()).double()
    mn.convert_(net, mn.MimicNorm(), example=(2, 3, 32, 32), init="theory")
    x, y = torch.randn(9, 3, 32, 32, dtype=torch.float64), torch.randint(5, (9,))
    check_exact(net, F.cross_entropy, x, y, micro_batch=micro_batch)


@pytest.mark.parametrize("make", [vgg, efficientnet])
def test_dropout_and_stochastic_depth_replay(make):
    net = make().double()
    mn.convert_(net, mn.MimicNorm(), example=(2, 3, 32, 32), init="theory")
    x, y = torch.randn(7, 3, 32, 32, dtype=torch.float64), torch.randint(5, (7,))
    reference = check_replay(net, F.cross_entropy, x, y, 4)
    # ... and other random numbers would have been noticed
    net.zero_grad()
    torch.manual_seed(6)
    backward(net, F.cross_entropy, x, y, micro_batch=4)
    assert relative_error(net, reference) > 1e-3


class Drops(Classifier):
    """Draws Python's and NumPy's random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * random.choice([1.0, 2.0]) * (1 + np.random.rand()))


@pytest.mark.parametrize("in_pieces", [None, True])
@pytest.mark.parametrize(
    ("make", "loss_fn"),
    [
        (Drops, F.cross_entropy),
        (lambda: AveragedHeads(dropout=0.5), F.cross_entropy),
        (lambda: Segmenter(dropout=0.4), dict_loss),
    ],
)
def test_random_numbers_replay(make, loss_fn, in_pieces):
    x, y = batch(12)
    if loss_fn is dict_loss:
        y = torch.randint(4, (12, 9, 9))
    check_replay(converted(make()), loss_fn, x, y, 5, loss_in_pieces=in_pieces)


class Tokens(Classifier):
    """A head at each position, whose output is written into."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x).flatten(2).movedim(1, 2)).mul_(1.5)


def token_loss(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out.movedim(1, 2), targets[:, None].expand(-1, out.shape[1]))


@pytest.mark.parametrize("micro_batch", [1, 7, 12])
@pytest.mark.parametrize("how", [{}, {"return_outputs": True}, {"return_outputs": True, "loss_in_pieces": True}])
@pytest.mark.parametrize(
    ("make", "loss_fn"),
    [
        *((Classifier, F.cross_entropy), (AveragedHeads, F.cross_entropy), (Pooled, F.cross_entropy)),
        *((WithFeatures, feature_loss), (SharedHead, two_view_loss), (Segmenter, dict_loss)),
        (Tokens, token_loss),
    ],
)
def test_tails_several_heads_shared_heads_and_segmentation(make, loss_fn, how, micro_batch):
    x, y = batch(12)
    if make is Segmenter:
        y = torch.randint(4, (12, 9, 9))
    check_exact(converted(make()), loss_fn, x, y, micro_batch=micro_batch, **how)


@pytest.mark.parametrize(
    ("last_norm", "how"),
    [(True, {}), (False, {}), (True, {"loss_in_pieces": True}), (True, {"scaler": 2.0**10, "loss_in_pieces": True})],
    ids=["two passes", "one pass", "in pieces", "scaled"],
)
def test_weighted_sum_with_a_denominator(last_norm, how):
    net = converted(Classifier(), last_norm=last_norm)
    x, y = batch()
    y[:5] = -100
    weight = torch.rand(5, dtype=torch.float64) + 0.1
    whole, loss = full_batch(net, nn.CrossEntropyLoss(weight), x, y)
    total = nn.CrossEntropyLoss(weight, reduction="sum")
    scale = how.get("scaler", 1.0)
    for denominator in (float(weight[y[5:]].sum()), lambda t: weight[t[t >= 0]].sum()):
        part = copy.deepcopy(net)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale) if "scaler" in how else None
        value = backward(part, total, x, y, micro_batch=3, denominator=denominator, **{**how, "scaler": scaler})
        torch.testing.assert_close(value, loss)
        for p in part.parameters():
            p.grad /= scale
        assert relative_error(part, whole) <= EXACT


def test_inputs_as_tuple_dict_and_loader():
    net = converted(Classifier())
    x, y = batch(11)
    shift = torch.randn(11, 12, dtype=torch.float64)
    whole = copy.deepcopy(net)
    F.cross_entropy(whole(x, shift), y).backward()
    pairs = (((a, s), t) for a, s, t in zip(x.split(4), shift.split(4), y.split(4), strict=True))
    for inputs, targets, micro_batch in [
        ((x, shift), y, 4),
        ({"x": x, "shift": shift}, y, 4),
        (pairs, None, None),  # a generator: it can be read only once
    ]:
        part = copy.deepcopy(net)
        backward(part, F.cross_entropy, inputs, targets, micro_batch=micro_batch)
        assert relative_error(part, whole) <= EXACT


def test_gradients_accumulate_into_grad_and_reach_inputs():
    net = converted(Classifier())
    x, y = batch(8)
    x.requires_grad_()
    full_batch(net, F.cross_entropy, x, y)
    of_input, x.grad = x.grad, None
    backward(net, F.cross_entropy, x, y, micro_batch=3)
    torch.testing.assert_close(x.grad, of_input)
    once = gradient(net)
    backward(net, F.cross_entropy, x, y, micro_batch=3)
    torch.testing.assert_close(gradient(net), 2 * once)


@pytest.mark.parametrize("last_norm", [True, False])
def test_an_input_that_is_an_output_gets_its_gradient_once(last_norm):
    class Returns(Classifier):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), x

    def loss_fn(out: tuple, targets: Tensor) -> Tensor:
        return F.cross_entropy(out[0], targets) + out[1].mean(0).square().sum()  # not a mean over samples

    net = converted(Classifier(), run_as=Returns, last_norm=last_norm)
    x, y = batch(8)
    x.requires_grad_()
    full_batch(net, loss_fn, x, y)
    expected, x.grad = x.grad, None
    backward(net, loss_fn, x, y, micro_batch=3)
    torch.testing.assert_close(x.grad, expected)


def test_frozen_parameters_stay_without_gradient():
    net = converted(AveragedHeads())
    net.body.requires_grad_(False)
    check_exact(net, F.cross_entropy, *batch(8), micro_batch=3)
    assert all(p.grad is None and not p.requires_grad for p in net.body.parameters())


def test_a_last_norm_in_eval_mode_is_one_pass_too():
    net = converted(Classifier())
    net(batch()[0])
    net.fc.last_norm.eval()
    before = state(net.fc.last_norm)
    check_exact(net, F.cross_entropy, *batch(), micro_batch=1)
    assert torch.equal(state(net.fc.last_norm), before)


def test_memory_of_one_sample():
    net = converted(Classifier())
    x, y = batch(64)
    peaks = []
    for run in (
        lambda: F.cross_entropy(net(x), y).backward(),
        lambda: backward(net, F.cross_entropy, x, y, micro_batch=1),
    ):
        net.zero_grad()
        with (saved := SavedBytes([*net.parameters(), *net.buffers(), x])):
            run()
        assert saved.now == 0
        peaks.append(saved.peak)
    assert peaks[1] <= peaks[0] / 20
    assert peaks[1] > 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of the pass without a graph
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_around_the_head(reentrant):
    class Checkpointed(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x).mean((2, 3))
            return checkpoint(self.fc, y, use_reentrant=reentrant)

    net = converted(Checkpointed())
    x, y = batch(12)
    plain = Classifier().double()
    mn.convert_(plain, mn.MimicNorm(), example=x[:2], init=None)
    plain.load_state_dict(net.state_dict())
    whole, _ = full_batch(plain, F.cross_entropy, x, y)
    backward(net, F.cross_entropy, x, y, micro_batch=5)
    assert relative_error(net, whole) <= EXACT
    assert net.fc.last_norm.num_batches_tracked == 1


def test_autocast_and_grad_scaler():
    """bf16 inside: compared with one graph over the same micro-batches, scaled by a power of two."""
    net = converted(Classifier(dropout=0.3), torch.float32)
    x, y = batch(12, torch.float32)
    reference = copy.deepcopy(net)
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):
        one_graph(reference, F.cross_entropy, x, y, 5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):
        backward(net, F.cross_entropy, x, y, micro_batch=5, scaler=scaler)
    assert float(gradient(net).norm() / gradient(reference).norm()) == pytest.approx(2**10, rel=0.05)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1e9)
    assert all(p.grad is not None for p in net.parameters())
    assert relative_error(net, reference) <= 0.02
    scaler.step(optimizer)
    scaler.update()


def test_training_ends_in_the_same_weights():
    """Ten steps with momentum, weight decay, clipping: full batch and micro-batches."""
    nets = [converted(Classifier())]
    nets.append(copy.deepcopy(nets[0]))
    for net, micro_batch in zip(nets, (None, 4), strict=True):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        g = torch.Generator().manual_seed(2)
        for _ in range(10):
            x = torch.randn(16, 3, 9, 9, generator=g, dtype=torch.float64)
            y = torch.randint(5, (16,), generator=g)
            optimizer.zero_grad()
            if micro_batch is None:
                F.cross_entropy(net(x), y).backward()
            else:
                backward(net, F.cross_entropy, x, y, micro_batch=micro_batch)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    a, b = (torch.cat([t.double().flatten() for t in net.state_dict().values()]) for net in nets)
    assert float((a - b).norm() / a.norm()) < 1e-9


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks, where it breaks a graph
@pytest.mark.skipif(os.name == "nt", reason="needs a C++ compiler")
def test_compiled():
    net = converted(AveragedHeads())
    x, y = batch(8)
    whole, _ = full_batch(net, F.cross_entropy, x, y)
    compiled = torch.compile(net, backend="aot_eager")
    torch._dynamo.reset()
    counter = torch._dynamo.utils.counters["stats"]
    backward(compiled, F.cross_entropy, x, y, micro_batch=4)
    assert relative_error(net, whole) <= EXACT
    graphs = counter["unique_graphs"]
    net.zero_grad()
    backward(compiled, F.cross_entropy, x, y, micro_batch=4)
    assert relative_error(net, whole) <= EXACT
    assert graphs > 0
    assert counter["unique_graphs"] == graphs, "a second call compiles nothing anew"
