from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import mimicnorm as mn
from mimicnorm.errors import InitError
from mimicnorm.surgery import probe


def kept(norm, shape):
    found = probe.norm(norm, shape)
    return None if found is None else list(found.children)


def test_timm_batch_norm_act_keeps_dropout_and_activation():
    norm_act = zoo.timm().layers.BatchNormAct2d(8, drop_layer=nn.Dropout)
    assert kept(norm_act, torch.Size((2, 8, 4, 4))) == ["drop", "act"]
    assert kept(norm_act, None) == ["drop", "act"]
    silent = zoo.timm().layers.BatchNormAct2d(8, apply_act=False, drop_layer=nn.Dropout)
    assert kept(silent, None) == ["drop", "act"]
    frozen = zoo.timm().layers.FrozenBatchNormAct2d(8)
    assert kept(frozen, torch.Size((2, 8, 4, 4))) == ["drop", "act"]


def test_torchvision_frozen_batch_norm():
    frozen = zoo.torchvision().ops.FrozenBatchNorm2d(8)
    frozen.running_mean.fill_(3.0)
    assert kept(frozen, torch.Size((2, 8, 4, 4))) == []
    assert frozen.running_mean.mean() == 3.0


def test_norms_that_do_something_else():
    class Swapped(nn.BatchNorm2d):
        def __init__(self, n):
            super().__init__(n)
            self.act = nn.ReLU()

        def forward(self, x):
            return super().forward(self.act(x))

    class Signed(nn.BatchNorm2d):
        def forward(self, x):
            return -super().forward(x)

    class Needy(nn.BatchNorm2d):
        def forward(self, x, y):
            return super().forward(x) + y

    for kind in (Signed, Needy, Swapped):
        assert kept(kind(4), torch.Size((2, 4, 3, 3))) is None


def test_subclasses_that_only_rename():
    class Mine(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x.float())

    assert kept(Mine(4), torch.Size((2, 4))) == []
    assert kept(Mine(4, track_running_stats=False, affine=False), torch.Size((2, 4, 5))) == []


def test_sequences_with_channels_last():
    class Transposing(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x.transpose(1, 2)).transpose(1, 2)

    for shape in ((2, 6, 8), (2, 4, 8), (2, 8, 8)):
        assert probe.norm(Transposing(8), torch.Size(shape)) == probe.NormProbe((), -1)
    assert probe.norm(zoo.timm().layers.BatchNormAct2d(8), torch.Size((2, 8, 9, 9))).channel_dim == 1


def test_probes_under_another_default_type_and_device():
    norm_act = zoo.timm().layers.BatchNormAct2d(8)
    torch.set_default_dtype(torch.float64)
    try:
        assert kept(norm_act, torch.Size((2, 8, 4, 4))) == ["drop", "act"]
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert kept(norm_act, torch.Size((2, 8, 4, 4))) == ["drop", "act"]
        assert probe.layer(Padded(4, 4, 3, device="cpu"), torch.Size((2, 4, 6, 6))).centres


class Padded(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias)


class Standardised(nn.Conv2d):
    def forward(self, x):
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, w / w.std((1, 2, 3), keepdim=True), self.bias)


class Squared(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight**2, self.bias)


class Unbiased(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight)


class Mirrored(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias) + F.conv2d(x, self.weight.flip(3))


class Masked(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight * 0.5, self.bias)


@pytest.mark.parametrize("layer", [Mirrored, Masked])
def test_a_scalar_on_the_weight_is_not_trusted_to_a_forward_that_computes_another(layer):
    assert probe.layer(layer(4, 4, 3), torch.Size((2, 4, 6, 6))) == probe.LayerProbe(False, False, True, False)


def test_layers():
    shape = torch.Size((2, 4, 6, 6))
    assert probe.layer(nn.Conv2d(4, 4, 3), shape) == probe.LayerProbe(True, True, True, True, keeps=True)
    assert probe.layer(Padded(4, 4, 3), shape) == probe.LayerProbe(True, True, True, True, keeps=True)
    assert probe.layer(Standardised(4, 4, 3), shape) == probe.LayerProbe(True, False, True, False, follows=False)
    assert not probe.layer(Squared(4, 4, 3), shape).centres
    assert not probe.layer(Unbiased(4, 4, 3, bias=False), shape).takes_bias
    same = zoo.timm().layers.create_conv2d(4, 8, 3, stride=2, padding="same")
    assert type(same).__name__ == "Conv2dSame"
    assert probe.layer(same, shape) == probe.LayerProbe(True, True, True, True, keeps=True)


class Normed(nn.Conv2d):
    """Holds the BatchNorm that it runs, which has a plan of its own."""

    def __init__(self):
        super().__init__(4, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(super().forward(x))


@pytest.mark.parametrize("tracks", [True, False])
def test_a_layer_is_probed_without_the_batch_norm_inside(tracks):
    layer = Normed()
    nn.init.normal_(layer.norm.bias)
    layer.norm.running_mean += 1
    if not tracks:
        layer.norm.running_mean = layer.norm.running_var = None
    assert probe.layer(layer, torch.Size((2, 4, 6, 6))) == probe.LayerProbe(True, True, True, True, keeps=True)
    assert "forward" not in layer.norm.__dict__


def test_probes_on_the_meta_device():
    with torch.device("meta"):
        norm, conv = zoo.timm().layers.BatchNormAct2d(8), Padded(4, 4, 3)
    assert kept(norm, torch.Size((2, 8, 4, 4))) == ["drop", "act"]
    assert probe.layer(conv, torch.Size((2, 4, 6, 6))).centres


class ConvWS2d(nn.Conv2d):
    """Weight standardisation by hand, as in other packages."""

    def forward(self, x):
        rows = self.weight.flatten(1)
        weight = (rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-5)
        return self._conv_forward(x, weight.view_as(self.weight), self.bias)


def standardised_network(layer: type[nn.Module]) -> nn.Sequential:
    blocks = [(layer(c, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for c in (8, *[16] * 5)]
    return nn.Sequential(
        *(m for block in blocks for m in block), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    )


@pytest.mark.parametrize("layer", [ConvWS2d, "StdConv2d", "ScaledStdConv2d"])
@pytest.mark.parametrize("method", [mn.MimicNorm(), mn.NoNorm(), mn.GroupNormWS(), mn.ScaledWS()], ids=str)
def test_layers_whose_output_does_not_follow_their_weight_are_refused(layer, method):
    layer = getattr(zoo.timm().layers, layer) if isinstance(layer, str) else layer
    planned = mn.plan(standardised_network(layer), method, example=(4, 8, 8, 8))
    assert [r.name for r in planned.refusals] == [str(i) for i in range(0, 18, 3)]
    clashes = method.weights == "standardise" and hasattr(layer(8, 8, 1), "gain")  # which is noticed first
    why = "an attribute 'gain' of its own" if clashes else "is not proportional to its weight"
    assert why in planned.refusals[0].reason
    mn.convert(standardised_network(layer), mn.NoNorm(), example=(4, 8, 8, 8), init=None)  # left alone


def test_calibration_reads_back_what_it_achieved(monkeypatch):
    monkeypatch.setattr(probe, "layer", lambda *_: probe.LayerProbe(True, True, True, True))
    model = standardised_network(ConvWS2d)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(InitError, match="cannot calibrate 0: with its weight scaled for a variance of 1, the variance"):
        mn.convert_(model, mn.NoNorm(), example=(4, 8, 8, 8), init="calibrate")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
