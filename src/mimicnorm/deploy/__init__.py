"""From a converted network to a file: fold it to plain layers, export it, quantise it."""

from mimicnorm.deploy.export import Exported, export
from mimicnorm.deploy.fold import Folded, fold, fold_with_report, fuse
from mimicnorm.deploy.int8 import accuracy, quantise

__all__ = ["Exported", "Folded", "accuracy", "export", "fold", "fold_with_report", "fuse", "quantise"]
