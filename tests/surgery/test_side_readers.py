"""What reads a layer's output beside its BatchNorm, or its weight beside the layer: the function must not change."""

from __future__ import annotations

import pytest
import torch
from invariants import refuses
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from mimicnorm.errors import RefusedError
from mimicnorm.layers import TrainedAffine
from mimicnorm.methods import MimicNorm, NoNorm
from mimicnorm.surgery.convert import convert
from mimicnorm.surgery.planning import plan


class Net(nn.Module):
    """A convolution, its BatchNorm and a classifier; ``side`` is what else is computed."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.side: Tensor | None = None

    def classify(self, y: Tensor) -> Tensor:
        return self.fc(torch.relu(self.bn(y)).mean((2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.conv(x))


class Penalised(Net):
    def forward(self, x):
        y = self.conv(x)
        self.side = y.pow(2).mean()
        return self.classify(y)


class Hooked(Net):
    def __init__(self):
        super().__init__()
        self.bn.register_forward_hook(self.look)

    def look(self, _module, args, _output):
        self.side = args[0].mean((0, 2, 3))


class HookedAround(Net):
    def __init__(self):
        super().__init__()
        self.after = nn.Sequential(self.bn, nn.ReLU())
        self.after.register_forward_pre_hook(self.look)

    def look(self, _module, args):
        self.side = args[0].mean((0, 2, 3))

    def classify(self, y):
        return self.fc(self.after(y).mean((2, 3)))


class Embedding(Net):
    """Evaluation ranks by the feature before the BatchNorm."""

    def forward(self, x):
        y = self.conv(F.dropout(x, 0.1, self.training))  # code that names the mode twice
        return self.classify(y) if self.training else y.mean((2, 3))


class Dropping(nn.Module):
    """Layers that training drops by chance, and whose outputs only training returns."""

    def __init__(self):
        super().__init__()
        self.stem, self.fc, self.p = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5), 0.6
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))

    def forward(self, x):
        x, features = self.stem(x), []
        for conv, norm in zip(self.convs, self.norms, strict=True):
            if self.training and torch.rand(()).item() < self.p:
                continue
            y = conv(x)
            features.append(y)
            x = torch.relu(x + norm(y))
        out = self.fc(x.mean((2, 3)))
        return (out, features) if self.training else out


class Domains(nn.Module):
    """A BatchNorm per domain, in containers of their own."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)])
        self.norms = nn.ModuleList(nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2)) for _ in range(2))
        self.fc = nn.Linear(8, 5)

    def forward(self, x, domain):
        for conv, norm in zip(self.convs, self.norms[int(domain)], strict=True):
            x = torch.relu(norm(conv(x)))
        return self.fc(x.mean((2, 3)))


def trained(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    model.double().eval()
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            nn.init.normal_(tensor)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return model


def images() -> Tensor:
    return torch.randn(6, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", [Net, Penalised, Hooked, HookedAround, Embedding])
@pytest.mark.parametrize("method", [NoNorm(), MimicNorm(min_fan_in=1)])
def test_a_kept_network_computes_the_same_beside_its_output(kind, method):
    model = trained(kind())
    expected, side = model(images()), model.side
    model.side = None
    kept = convert(model, method, example=images(), init="keep").eval()
    torch.testing.assert_close(kept(images()), expected)
    torch.testing.assert_close(kept.side, side)


@pytest.mark.parametrize(("kind", "action"), [(Net, "remove"), (Penalised, "shift"), (Embedding, "shift")])
def test_beta_goes_into_a_layer_only_if_its_batch_norm_alone_reads_it(kind, action):
    assert [n.action for n in plan(kind(), NoNorm(), example=(2, 3, 8, 8)).norms] == [action]


@pytest.mark.parametrize("seed", range(3))
def test_what_training_alone_reads_in_dropped_blocks_is_as_before(seed):
    model = trained(Dropping())
    torch.manual_seed(seed)
    converted = convert(model, NoNorm(), example=images(), init=None).train()
    model.p = converted.p = 0.0
    torch.testing.assert_close(converted(images())[1][0], model.train()(images())[1][0])


@pytest.mark.parametrize("shown", [0, 1])
def test_a_domain_that_the_example_does_not_show_is_kept(shown):
    model = trained(Domains())
    kept = convert(model, NoNorm(), example=(images(), torch.tensor(shown)), init="keep").eval()
    for domain in map(torch.tensor, (0, 1)):
        torch.testing.assert_close(kept(images(), domain), model(images(), domain))


class Adversarial(nn.Module):
    """Samples of another kind have norms of their own, kept elsewhere; a block that never runs has layers, too."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.fc, self.clean = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5), True
        self.extra = nn.ModuleDict({"adversarial": nn.Sequential(nn.BatchNorm2d(8))})
        self.spare = nn.Sequential(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16))
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1))

    def forward(self, x):
        norm = self.norm if self.clean else self.extra["adversarial"]
        return self.fc(self.body(norm(self.stem(x))).mean((2, 3)))


def test_a_norm_that_may_share_a_layer_is_kept_wherever_it_is():
    model = trained(Adversarial())
    kept = convert(model, NoNorm(), example=images(), init="keep")
    assert isinstance(kept.norm, TrainedAffine)
    assert type(kept.body[2]) is nn.Identity  # the norm that did not run has a layer of its own
    for clean in (True, False):
        model.clean = kept.clean = clean
        torch.testing.assert_close(kept(images()), model(images()), rtol=1e-10, atol=1e-10)


class Stems(nn.Module):
    """A stem per kind of input, and one norm for both."""

    def __init__(self):
        super().__init__()
        self.color, self.flow = nn.Conv2d(3, 8, 3), nn.Conv2d(2, 8, 3)
        self.norm, self.fc = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x):
        stem = self.color if x.shape[1] == 3 else self.flow
        return self.fc(torch.relu(self.norm(stem(x))).mean((2, 3)))


def test_a_norm_that_a_layer_shares_that_did_not_run_is_kept():
    model = trained(Stems())
    kept = convert(model, NoNorm(), example=images(), init="keep")
    for x in (images(), images()[:, :2]):
        torch.testing.assert_close(kept(x), model(x), rtol=1e-10, atol=1e-10)


class Mixed(nn.BatchNorm2d):
    """A BatchNorm with another one inside, for samples of another kind."""

    def __init__(self, width: int):
        super().__init__(width)
        self.other, self.clean = nn.BatchNorm2d(width), True

    def forward(self, x):
        return super().forward(x) if self.clean else self.other(x)


@pytest.mark.parametrize("init", ["auto", "keep"])
def test_a_norm_with_another_one_inside_is_refused(init):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Mixed(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    model = trained(model) if init == "keep" else model.double()
    refuses(model, NoNorm(), example=images(), init=init, match="1: Mixed does more than normalise")


class Autoencoder(nn.Module):
    """``decode`` uses the encoder's weight."""

    def __init__(self, decode):
        super().__init__()
        self.enc, self.bn, self.fc, self.decode = nn.Linear(20, 18), nn.BatchNorm1d(18), nn.Linear(18, 5), decode

    def forward(self, x):
        h = torch.relu(self.bn(self.enc(x)))
        return self.fc(h), self.decode(h, self.enc.weight)


class Tied(nn.Module):
    """Two layers with one weight; the second is centred, too, if a BatchNorm follows it."""

    def __init__(self, second: nn.Module, normed: bool):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), second
        self.second.weight = self.first.weight
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8) if normed else nn.Identity()])
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.norms[0](self.first(x)))
        return self.fc(torch.relu(self.norms[1](self.second(x))).mean((2, 3)))


@pytest.mark.parametrize("decode", [torch.matmul, lambda h, w: F.linear(h, w.t())])
def test_a_weight_that_meets_data_outside_its_layer_is_not_centred(decode):
    with pytest.raises(RefusedError, match="enc: its weight is used by a function outside its own forward"):
        convert(Autoencoder(decode), MimicNorm(), example=(4, 20), head="fc")
    assert plan(Autoencoder(decode), NoNorm(), example=(4, 20), head="fc").ok  # W is as it was
    regularised = Autoencoder(lambda _h, w: w.norm())  # no data meets the weight
    assert plan(regularised, MimicNorm(), example=(4, 20), head="fc").ok


@pytest.mark.parametrize(
    ("second", "normed", "ok"),
    [
        (nn.Conv2d(8, 8, 3, padding=1), True, True),
        (nn.Conv2d(8, 8, 3, padding=1, dilation=1), False, False),
        (nn.ConvTranspose2d(8, 8, 3, padding=1), True, False),
    ],
    ids=["both centred", "one centred", "along other rows"],
)
def test_tied_weights_are_centred_alike_or_not_at_all(second, normed, ok):
    planned = plan(Tied(second, normed), MimicNorm(), example=(2, 8, 6, 6))
    assert planned.ok == ok
    if not ok:
        assert "its weight is also that of" in planned.refusals[0].reason


class Doubled(nn.Module):
    def forward(self, bias):
        return 2 * bias


@pytest.mark.parametrize("init", [None, "keep"])
def test_a_bias_that_is_computed_from_others_takes_no_beta(init):
    model = trained(Net())
    parametrize.register_parametrization(model.conv, "bias", Doubled())
    assert [n.action for n in plan(model, NoNorm(), example=images(), init=init).norms] == [
        "affine" if init else "shift"
    ]
    converted = convert(model, NoNorm(), example=images(), init="keep").eval()
    torch.testing.assert_close(converted(images()), model(images()))
