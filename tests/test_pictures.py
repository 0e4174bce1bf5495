from __future__ import annotations

from pathlib import Path

import pytest

from mimicnorm.errors import PictureError
from mimicnorm.pictures import canvas, require_picture, save

pytest.importorskip("matplotlib")


def test_the_ending_chooses_the_format(tmp_path):
    figure, _ = canvas(1, 1, 2, 2)
    save(figure, tmp_path / "a.png")
    save(figure, tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("name", "says"), [("a.xyz", r"'\.xyz' is not an image format"), ("deep/a.png", "there is no directory")]
)
def test_a_path_that_cannot_be_written_is_refused(tmp_path, name, says):
    with pytest.raises(PictureError, match=says):
        require_picture(tmp_path / name)


def test_a_full_disk_is_named_and_leaves_the_old_picture(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_text("the old one")

    def full(self, data):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PictureError, match=r"cannot write .*a\.png: No space left on device"):
        save(canvas(1, 1, 2, 2)[0], path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]
    assert path.read_text() == "the old one"
