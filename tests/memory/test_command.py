"""``mimicnorm memory``: what only the command does."""

import json

import pytest
import torch

from mimicnorm import memory
from mimicnorm.cli import main
from mimicnorm.errors import MemoryPredictionError
from mimicnorm.methods import METHODS

WORDS = ["memory", "resnet10", "--input", "cifar", "--width", "0.25", "--batch", "4"]


def printed(capsys, *more: str) -> dict:
    assert main([*WORDS, "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["batchnorm", "mimicnorm", "nonorm"]),
        (["--methods", "all"], [*METHODS]),
        (["--methods", "nonorm,"], ["nonorm"]),
    ],
)
def test_three_methods_by_default_or_those_named_or_all(words, names, monkeypatch):
    compared = []

    def compare(model, shape, methods, **settings):
        compared.extend(method.name for method in methods)
        raise MemoryPredictionError("enough")

    monkeypatch.setattr(memory, "compare", compare)
    assert main([*WORDS, *words]) == 2
    assert compared == names


def test_progress_is_shown_on_a_terminal_and_results_stay_apart(capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert main([*WORDS, "--methods", "batchnorm", "--json", "--budget", "64MiB"]) == 0
    captured = capsys.readouterr()
    assert "batchnorm: predicting" in captured.err
    assert list(json.loads(captured.out)["methods"]) == ["batchnorm"]


def test_the_command_predicts_for_a_device(capsys, monkeypatch):
    one = ("--methods", "batchnorm")
    assert printed(capsys, *one)["device"] == printed(capsys, *one, "--device", "cpu")["device"] == "cpu"
    for_gpu = printed(capsys, *one, "--device", "cuda")
    assert for_gpu["device"] == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert printed(capsys, *one) == for_gpu
    assert main([*WORDS, "--device", "cuda", "--no-fake"]) == 2
    assert "--no-fake runs the step on cuda, which cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plot", "x.xyz"], "cannot draw to 'x.xyz'"),
        (["--methods", ""], "--methods names no method"),
        (["--device", "gpu"], "device='gpu' is not a device: give 'cpu', 'cuda'"),
        (["--budget", "1e30"], "'1e30' is not an amount of memory"),
    ],
)
def test_the_command_refuses_before_it_loads_anything(words, message, capsys, monkeypatch):
    monkeypatch.setattr("mimicnorm.models.find", lambda *_, **__: pytest.fail("the model was loaded"))
    assert main(["memory", "torchvision:resnet18", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
