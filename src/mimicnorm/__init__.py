"""Take BatchNorm out of any PyTorch network and keep what it was good for.

    import mimicnorm as mn

    report = mn.convert_(model, mn.MimicNorm(), example=(2, 3, 224, 224))

This file is the table of contents. Names load on first use, so that ``import mimicnorm`` (and the command line's
``--help``) does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "convert": "surgery.convert",
    "convert_": "surgery.convert",
    "check": "surgery.convert",
    "init_": "surgery.convert",
    "project_": "layers",
    "Report": "surgery.plan",
    "param_groups": "layers.param_groups",
    "plan": "surgery.planning",
    "Plan": "surgery.plan",
    "MimicNorm": "methods",
    "WeightMean": "methods",
    "LastBN": "methods",
    "NoNorm": "methods",
    "BatchNorm": "methods",
    "Fixup": "methods",
    "SkipInit": "methods",
    "GroupNormWS": "methods",
    "ScaledWS": "methods",
    "fold": "deploy.fold",
    "MimicNormError": "errors",
}
_MODULES = (
    *(
        "compare",
        "compress",
        "data",
        "deploy",
        "errors",
        "integer",
        "layers",
        "memory",
        "methods",
        "microbatch",
        "models",
        "opacus",
        "report",
    ),
    *("theory", "training"),
)

__all__ = [*_WHERE, *_MODULES]

if TYPE_CHECKING:
    from mimicnorm import (
        compare,
        compress,
        data,
        deploy,
        errors,
        integer,
        layers,
        memory,
        methods,
        microbatch,
        models,
        opacus,
        report,
        theory,
        training,
    )
    from mimicnorm.deploy.fold import fold
    from mimicnorm.errors import MimicNormError
    from mimicnorm.layers import project_
    from mimicnorm.layers.param_groups import param_groups
    from mimicnorm.methods import (
        BatchNorm,
        Fixup,
        GroupNormWS,
        LastBN,
        MimicNorm,
        NoNorm,
        ScaledWS,
        SkipInit,
        WeightMean,
    )
    from mimicnorm.surgery.convert import check, convert, convert_, init_
    from mimicnorm.surgery.plan import Plan, Report
    from mimicnorm.surgery.planning import plan


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"mimicnorm.{_WHERE[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"mimicnorm.{name}")
    else:
        raise AttributeError(f"module 'mimicnorm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
