"""Methods side by side: one network, one data set, several ways to do with or without BatchNorm.

    mimicnorm compare --model resnet18 --width 0.25 --data cifar100 --methods batchnorm,mimicnorm,nonorm --out runs/c

Start reading in ``run.py``.
"""

from mimicnorm.compare.job import Contestant, Job, base_recipe, contestants
from mimicnorm.compare.run import run

__all__ = ["Contestant", "Job", "base_recipe", "contestants", "run"]
