"""From a converted network to a file: fold it to plain layers, export it, quantise it."""

from mimicnorm.deploy.fold import Folded, fold, fold_with_report

__all__ = ["Folded", "fold", "fold_with_report"]
