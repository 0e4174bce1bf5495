"""`mimicnorm theory`: its output and its errors."""

from __future__ import annotations

import numpy as np
import pytest

from mimicnorm.cli.theory import Doctor, Figure
from mimicnorm.theory import TheoryError


@pytest.mark.parametrize("inputs", ["x.npy", "digits"])
def test_figures_take_samples_from_a_file_or_a_data_set(inputs, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.random.default_rng(0).random((410, 4, 5), dtype=np.float32))
    Figure("correlations", out="c.png", inputs=inputs).run()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_named(tmp_path):
    broken, pickled = tmp_path / "broken.npy", tmp_path / "pickled.npy"
    broken.write_bytes(b"no array")
    np.save(pickled, np.array([{}], dtype=object), allow_pickle=True)
    for path in (broken, pickled, tmp_path / "absent.npy"):
        with pytest.raises(TheoryError, match="cannot read samples"):
            Figure("correlations", inputs=str(path)).run()
    with pytest.raises(TheoryError, match=r"must be a \.npy file"):
        Figure("correlations", inputs="data.parquet").run()
    with pytest.raises(TheoryError, match="at least 2, not 1"):
        Doctor("timm:resnet18", batch=1).run()


def test_names_of_layers_are_whole_at_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    Doctor("resnet50", input="cifar", width=0.125, batch=2).run()
    out = capsys.readouterr().out
    assert all(f"layer1.0.conv{number} " in out for number in (1, 2, 3))
    assert "…" not in out
    assert out.count("before") == 5  # in the title, above each quantity, and in the verdict


def test_the_doctor_takes_networks_of_ones_own(capsys, tmp_path, monkeypatch):
    (tmp_path / "mywaves.py").write_text(
        "from torch import nn\n"
        "def net():\n    return nn.Sequential(nn.Conv1d(2, 8, 30), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 3, 1))\n"
    )
    monkeypatch.chdir(tmp_path)
    Doctor("mywaves:net", shape=(4, 2, 64), head="3").run()
    out = capsys.readouterr().out
    assert "before and after mimicnorm" in out
    assert "before is healthy: variance" in out
    assert "mimicnorm is healthy: variance" in out
    with pytest.raises(TheoryError, match="first number of --shape must be at least 2, not 1"):
        Doctor("mywaves:net", shape=(1, 2, 64)).run()
