"""The numbers of the README are those of the result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def load(name: str):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def test_readme_quotes_the_results():
    text = " ".join((ROOT / "README.md").read_text().split())
    ratios = {(r["network"], r["setting"]): r for r in load("memory-ratios")["rows"]}
    resnet50 = ratios["resnet50", "eager"]["saved_mib_per_image"]
    quoted = [f"{resnet50['mimicnorm']:.2f}", f"{resnet50['batchnorm']:.2f}"]
    for network in ("resnet50", "resnet18", "vgg16_bn", "shufflenet_v2_x0_5", "densenet121"):
        quoted.append(f"{ratios[network, 'eager']['mimicnorm_over_batchnorm']:.3f}")
    peak = load("memory-peak")
    quoted.append(f"{peak['methods']['mimicnorm']['peak_bytes'] / peak['methods']['batchnorm']['peak_bytes']:.3f}")
    quoted.append(f"{peak['largest_batch_ratio']:.2f}")
    exact = load("microbatch-exact")["rows"]
    for dtype in ("float64", "float32"):
        worst = max(r["error"] for r in exact if r["dtype"] == dtype)
        quoted.append(f"{worst:.1e}".replace("e-0", "e-"))
    quoted.append(f"{load('microbatch-time')['processor']['ratio_median']:.2f}")
    speed = {row["cell"]: row for row in load("speed")["rows"]}
    for cell in (f"resnet50-{batch}-224{layout}" for batch in (8, 32) for layout in ("", "-contiguous")):
        over = speed[cell]["batchnorm_over"]["wall"]
        quoted += [f"{over[method]['value']:.2f}" for method in ("mimicnorm", "nonorm")]
    quoted += [f"{100 * speed[c]['centring_share']['value']:.1f} %" for c in ("resnet50-8-224", "resnet50-32-224")]
    slower = speed["resnet50-8-112"]["batchnorm_over"]["wall"]["mimicnorm"]["value"]
    quoted.append(f"is {100 / slower - 100:.0f} % slower")
    compared = load("compare-cifar100-resnet18")["methods"]
    quoted += [f"{100 * m['accuracy']['mean']:.1f} %" for m in compared]
    missing = [q for q in quoted if q not in text]
    assert not missing, missing


def test_readme_quotes_the_coverage():
    text = (ROOT / "README.md").read_text()
    summary = load("coverage")
    if "@" in text:
        pytest.fail("README has a placeholder left")
    assert f"{summary['outcomes']['converted']} of {summary['models']}" in text
