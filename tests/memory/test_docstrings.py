import doctest
import importlib
import pkgutil

import pytest

from mimicnorm import memory

NAMES = [f"mimicnorm.memory.{module.name}" for module in pkgutil.iter_modules(memory.__path__)]


@pytest.mark.parametrize("name", NAMES)
def test_examples_in_docstrings_are_true(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
