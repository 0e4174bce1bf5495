"""``mimicnorm compare`` as a user types it."""

from __future__ import annotations

import json
import sys

from mimicnorm.cli import main

SMALL = ["--limit", "48", "--test-limit", "40", "--batch", "16", "--epochs", "1", "--width", "0.125", "--rounds", "0"]


def test_the_table_names_the_methods_and_the_page_how_to_repeat_it(tmp_path, capsys, monkeypatch, trains_here):
    words = ["compare", "--methods", "batchnorm,nonorm", "--seeds", "1", "--out", str(tmp_path / "my run"), *SMALL]
    monkeypatch.setattr(sys, "argv", ["mimicnorm", *words])
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "[2/2] nonorm-seed0: " in printed
    assert "report.html" in printed
    data = json.loads((tmp_path / "my run" / "compare.json").read_text())
    assert data["command"].startswith("mimicnorm compare --methods batchnorm,nonorm --seeds 1 --out '")


def test_torchrun_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert main(["compare", *SMALL]) == 2
    assert "run it without torchrun" in capsys.readouterr().err
