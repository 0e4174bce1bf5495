"""What a run shows: lines in a log, a bar on a terminal, nothing if asked."""

from __future__ import annotations

import io
import os
import sys

import pytest
import rich.console
import tiny

from mimicnorm.errors import MimicNormError
from mimicnorm.training import progress
from mimicnorm.training.progress import Progress

EPOCH = {"epoch": 1, "train_loss": 1.0, "train_accuracy": 0.5, "top1": 0.25, "top5": 1.0, "images_per_second": 123.4}


def show_an_epoch(**options) -> None:
    with Progress(tiny.recipe(validation=0.1), 21, **options) as bar:
        for step in range(1, 8):
            bar.step(step)
        bar.loss(7, 1, 1.234, 0.5)
        bar.epoch({**EPOCH, "test_loss": None, "confidence": None})
        bar.epoch({**EPOCH, "test_loss": 1.0, "confidence": 0.5, "calibration_error": 0.25})


def test_plain_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    show_an_epoch()
    loss, diverged, epoch = capsys.readouterr().out.splitlines()
    assert loss.startswith("epoch 1/3  loss 1.234  accuracy 50.0%")
    assert loss.endswith("min left")
    assert diverged.endswith("validation loss not finite top-1 25.00% top-5 100.00%  123 images/s")
    assert epoch.endswith(
        "validation loss 1.000 top-1 25.00% top-5 100.00% confidence 50.0% calibration error 25.0%  123 images/s"
    )


def test_a_bar_on_a_terminal(monkeypatch):
    terminal = io.StringIO()
    console = rich.console.Console(file=terminal, force_terminal=True, width=160)
    monkeypatch.setattr(rich.console, "Console", lambda: console)
    show_an_epoch()
    assert "7/21" in terminal.getvalue()
    assert "loss 1.234" in terminal.getvalue()
    assert "top-1 25.00%" in terminal.getvalue()


def test_nothing_if_not_shown(capsys):
    show_an_epoch(shown=False)
    assert capsys.readouterr() == ("", "")


def test_tensorboard_that_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MimicNormError, match="pip install tensorboard"):
        Progress(tiny.recipe(), 21, board=tmp_path)


def test_a_reader_that_went_away_stops_nothing(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", nobody)
        show_an_epoch()
        print("what follows goes nowhere", flush=True)
