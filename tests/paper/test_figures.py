import pytest

from mimicnorm.paper import figures

CURVES = [{"network": n, "method": m, "top1": [1.0, 2.0, 3.0]} for n in ("a", "b") for m in ("nonorm", "fixup")]
VARIANCE = [
    {"network": "a", "method": m, "step": [1, 2], "min": [1, 2], "median": [2, 3], "max": [4, 9], "diverged_at": d}
    for m, d in (("mimicnorm", None), ("nonorm", 3))
]


@pytest.mark.parametrize(("draw", "rows"), [(figures.curves, CURVES), (figures.variance, VARIANCE)])
def test_a_picture_is_written(draw, rows, tmp_path):
    draw(rows, tmp_path / "figure.png", None)
    assert (tmp_path / "figure.png").stat().st_size > 5000
