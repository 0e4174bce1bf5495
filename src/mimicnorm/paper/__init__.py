"""The paper's tables and figures, run again: published numbers, recipes per item, a verdict per claim."""

from mimicnorm.paper.items import ITEMS, SCALES, Item
from mimicnorm.paper.reproduce import reproduce
from mimicnorm.paper.verdicts import Judgement, judge

__all__ = ["ITEMS", "SCALES", "Item", "Judgement", "judge", "reproduce"]
