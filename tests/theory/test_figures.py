from __future__ import annotations

import pytest
import torch

from mimicnorm.errors import PictureError
from mimicnorm.theory import TheoryError, figures

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("name", ["transitions", "correlations", "residual", "phase"])
def test_figures_are_small_pngs(name, tmp_path):
    path = tmp_path / f"{name}.png"
    figures.draw(name, path, seed=1)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert 5_000 < len(data) < 150_000


def test_callers_data_are_drawn():
    for samples, pairs in ((450, 200), (9, 4)):
        axes = figures.correlations(inputs=torch.rand(samples, 4, 5)).axes
        assert [axis.get_title() for axis in axes] == ["straight", "weight mean", "BatchNorm"]
        assert [len(line.get_ydata()) for line in axes[0].lines] == [30] * (pairs + 1)  # and the infinite width


def test_every_name_has_a_drawer_and_others_are_refused(tmp_path):
    assert figures.NAMES == ("distributions", "transitions", "correlations", "ntk", "residual", "phase")
    with pytest.raises(TheoryError, match="choose one of distributions"):
        figures.draw("cobweb", tmp_path / "x.png")
    with pytest.raises(TheoryError, match="two finite samples"):
        figures.draw("correlations", tmp_path / "x.png", inputs=torch.full((4, 3), torch.nan))


def test_a_path_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setitem(figures._DRAWERS, "phase", lambda **_: pytest.fail("it was drawn"))
    with pytest.raises(PictureError, match="there is no directory"):
        figures.draw("phase", tmp_path / "deep" / "phase.png")
