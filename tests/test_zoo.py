"""Models that nobody here wrote: a sample over the families of torchvision and timm.

All are planned; a dozen run for real with every invariant. The whole zoo is ``benchmarks/coverage.py``.
"""

from __future__ import annotations

import invariants
import pytest
import torch
import zoo

from mimicnorm.errors import CheckError, RefusedError
from mimicnorm.methods import MimicNorm
from mimicnorm.surgery.convert import check, convert
from mimicnorm.surgery.planning import plan

TORCHVISION = [
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "vgg11_bn",
]
TIMM = [
    "convmixer_768_32",
    "cspdarknet53",
    "cspresnet50",
    "darknet53",
    "dla34",
    "dpn68",
    "ecaresnet26t",
    "coatnet_nano_rw_224",
    "efficientformer_l1",
    "efficientvit_b0",
    "fastvit_t8",
    "fbnetc_100",
    "gernet_s",
    "ghostnet_050",
    "ghostnetv2_100",
    "halonet26t",
    "hardcorenas_a",
    "hgnet_tiny",
    "hrnet_w18_small",
    "inception_resnet_v2",
    "legacy_seresnet18",
    "levit_128s",
    "lcnet_035",
    "mixnet_s",
    "mobileone_s0",
    "mobilevit_xxs",
    "nasnetalarge",
    "mobilevitv2_050",
    "regnety_002",
    "regnetz_b16",
    "repvgg_a0",
    "repvit_m0_9",
    "res2net50_14w_8s",
    "resnest14d",
    "resnetblur18",
    "resnetv2_50",
    "rexnet_100",
    "selecsls42",
    "semnasnet_050",
    "skresnet18",
    "tf_efficientnet_b0",
    "tinynet_e",
    "tresnet_m",
    "vovnet39a",
    "xception41",
    "xcit_nano_12_p16_224",
]
REAL = {
    "torchvision:resnet18": 32,
    "torchvision:googlenet": 32,
    "torchvision:shufflenet_v2_x0_5": 32,
    "torchvision:mobilenet_v3_small": 32,
    "timm:resnetv2_50": 32,
    "timm:densenet121": 32,
    "timm:repvgg_a0": 32,
    "timm:mobileone_s0": 32,
    "timm:hrnet_w18_small": 32,
    "timm:tf_efficientnet_b0": 32,
    "timm:levit_128s": 224,
    "timm:dla34": 32,
    "timm:skresnet18": 32,
    "timm:ghostnet_050": 32,
}


def build(spec: str) -> torch.nn.Module:
    source, _, name = spec.partition(":")
    if source == "timm":
        return zoo.timm().create_model(name)
    quick = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return zoo.torchvision().models.get_model(name, **quick)


def image(model: torch.nn.Module, spec: str) -> tuple[int, ...]:
    size = (getattr(model, "default_cfg", None) or {}).get("input_size", (3, 299, 299))
    return (2, *size)


@pytest.mark.parametrize("spec", [f"torchvision:{n}" for n in TORCHVISION] + [f"timm:{n}" for n in TIMM])
def test_every_batch_norm_is_planned(spec):
    with torch.device("cpu" if "regnet_" in spec else "meta"):  # torchvision's regnets compute with values
        model = build(spec)
    p = plan(model, MimicNorm(), example=image(model, spec))
    assert p.ok, str(p.refusals)
    assert len(p.norms) == sum(invariants.is_batch_norm(m) for m in model.modules())
    eligible = [s for s in p.layers if s.fan_in > 50 and s.why != "depthwise" and s.role != "gate"]
    assert all(s.action == "centre" for s in eligible)
    assert p.heads


@pytest.mark.parametrize("spec", REAL)
@pytest.mark.timeout(600)
def test_invariants_for_real(spec):
    model = build(spec)
    x = torch.randn(3, 3, REAL[spec], REAL[spec])
    invariants.surgery_removes_normalisation_and_nothing_else(model, x)
    invariants.no_sample_sees_another(convert(model, MimicNorm(last_norm=False), example=x), x)
    converted = convert(model, MimicNorm(), example=x)
    invariants.nothing_is_lost(model, converted)
    invariants.every_gradient_is_finite(converted, x)
    check(converted)


def test_reset_classifier_is_noticed():
    model = convert(build("timm:resnet18"), MimicNorm(), example=(2, 3, 32, 32))
    assert isinstance(model.fc, torch.nn.Linear)
    model.reset_classifier(7)
    with pytest.raises(CheckError, match="fc: the head was replaced"):
        check(model)


def test_features_without_a_head_are_refused_with_the_hint():
    model = zoo.timm().create_model("resnet18", num_classes=0)
    with pytest.raises(RefusedError, match=r"head=.*last_norm=False"):
        convert(model, MimicNorm(), example=(2, 3, 32, 32))
    convert(model, MimicNorm(last_norm=False), example=(2, 3, 32, 32))


def test_frozen_batch_norms_of_torchvision():
    model = zoo.torchvision().models.resnet18(norm_layer=zoo.torchvision().ops.FrozenBatchNorm2d)
    converted = convert(model, MimicNorm(), example=(2, 3, 32, 32))
    invariants.nothing_is_lost(model, converted)
    assert not converted.conv1.bias.requires_grad


def test_segmentation_model_with_auxiliary_head():
    models = zoo.torchvision().models.segmentation
    model = models.fcn_resnet50(weights=None, weights_backbone=None, num_classes=4, aux_loss=True)
    p = plan(model, MimicNorm(), example=(2, 3, 64, 64))
    assert {h.name for h in p.heads} == {"classifier.4", "aux_classifier.4"}
    assert all(h.dim == 1 and h.outputs == 4 for h in p.heads)
