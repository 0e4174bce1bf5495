"""An item end to end on a small scale: cached, resumed, judged, on a page; and the command around it."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from mimicnorm.cli import main
from mimicnorm.paper import ITEMS, SCALES, items, reproduce
from mimicnorm.paper.items import Scale, accuracies, best_top1, by_rate, curves
from mimicnorm.paper.page import page, section
from mimicnorm.paper.published import TABLE1, TABLE2, TABLE3
from mimicnorm.training.cache import cache_file

TINY = {"model": "mlp10", "limit": 64, "test_limit": 32, "epochs": 2, "batch": 32, "log_every": 100}


class _Digits(Scale):
    """Every recipe on digits, a second each."""

    def recipe(self, data, network, method, **changes):
        fields = {k: v for k, v in changes.items() if k in ("lr", "seed")}
        return items.recipe("digits-mlp10", method=method, **TINY, **fields)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(SCALES, "desk", _Digits(default=1))
    monkeypatch.setattr(items, "TABLE2", {lr: dict.fromkeys(("nonorm", "batchnorm")) for lr in (0.01, 0.2)})


@pytest.fixture
def done(tiny, tmp_path):
    where = {"results": tmp_path / "results", "runs": tmp_path / "runs"}
    return reproduce("table2", **where), where


def test_a_second_call_reads_the_cache_and_gives_the_same_file(done, tmp_path, monkeypatch):
    first, where = done
    assert len(first["runs"]) == 4
    assert not first["missing"]
    assert {row["lr"]: sorted(row) for row in first["rows"]} == {
        0.01: ["batchnorm", "lr", "nonorm"],
        0.2: ["batchnorm", "lr", "nonorm"],
    }
    path = tmp_path / "results" / "paper" / "table2-desk.json"
    written = path.read_text()
    monkeypatch.setattr("mimicnorm.training.sweep._start", lambda *_: pytest.fail("trained again"))
    assert reproduce("table2", **where) == first
    assert path.read_text() == written


def test_a_run_that_is_missing_is_trained_and_the_others_are_not(done, tmp_path):
    first, where = done
    label, key = next(iter(first["runs"].items()))
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "results" / "runs").iterdir()}
    (tmp_path / "results" / "runs" / f"{key}.json").unlink()
    assert reproduce("table2", **where)["runs"][label] == key
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "results" / "runs").iterdir()}
    assert {name for name in before if before[name] != after[name]} == {f"{key}.json"}


def test_the_command_prints_verdicts_and_writes_the_page(tiny, tmp_path, capsys):
    options = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    assert main(["reproduce", "table2", *options]) == 0
    assert "undecided" in capsys.readouterr().out
    assert "## table2" in (tmp_path / "results" / "paper" / "results.md").read_text()
    assert main(["reproduce", "list", *options]) == 0
    assert "figure-resnet-ablation" in capsys.readouterr().out


def test_table3_needs_gpus_and_says_so(tmp_path):
    data = reproduce("table3", results=tmp_path, runs=tmp_path / "runs")
    assert [v["verdict"] for v in data["verdicts"]] == ["needs GPUs, recipe ready"]
    assert len(data["missing"]) == 12


def test_an_unknown_item_names_near_ones(capsys):
    assert main(["reproduce", "table4"]) == 2
    assert "table1" in capsys.readouterr().err


@pytest.mark.parametrize("scale", SCALES)
def test_every_item_has_recipes_with_the_settings_of_the_paper(scale):
    for item in ITEMS.values():
        for label, recipe in item.recipes(SCALES[scale]).items():
            settings = dict(s.split("=") for s in recipe.resolved().settings)
            assert settings.get("logit_scale", "false") == (
                "false" if recipe.method in ("mimicnorm", "last-bn") else settings.get("logit_scale", "false")
            ), label
            recipe.check_names()


def test_ablations_and_table1_share_their_runs():
    keys = {name: {r.key() for r in ITEMS[name].recipes(SCALES["desk"]).values()} for name in ITEMS}
    assert len(keys["table1"]) == sum(len(TABLE1[n]) * len(SCALES["desk"].seeds_of(n)) for n in TABLE1)
    assert len(keys["table2"]) == 28
    for figure in ("figure-vgg-ablation", "figure-resnet-ablation"):
        assert keys[figure] & keys["table1"]


def test_paper_scale_is_the_papers_recipe():
    recipes = ITEMS["table1"].recipes(SCALES["paper"])
    chosen = recipes["cifar100 resnet50 mimicnorm seed 2"]
    assert (chosen.epochs, chosen.batch, chosen.width, chosen.limit) == (150, 128, 1.0, 0)
    assert dataclasses.asdict(chosen)["milestones"] == (80 / 150, 110 / 150, 135 / 150)
    assert {r.model for r in ITEMS["table3"].recipes(SCALES["paper"]).values()} == set(TABLE3)


def _run(model, method, top1, status="done", lr=0.1):
    history = [{"top1": value} for value in top1]
    return {"recipe": {"model": model, "method": method, "lr": lr}, "status": status, "history": history}


def test_rows_of_runs():
    runs = {
        "a": _run("vgg16", "mimicnorm", [0.1, 0.3]),
        "b": _run("vgg16", "mimicnorm", [0.2, 0.4]),
        "c": _run("vgg16", "nonorm", [], "diverged", lr=0.2),
        "d": _run("vgg16", "nonorm", [0.5], "diverged", lr=0.5),
    }
    ours, none = accuracies(runs)
    assert ours["top1"] == pytest.approx([30, 40])
    assert (none["top1"], none["diverged"]) == ([], 2)
    assert curves(runs)[0]["top1"] == pytest.approx([15, 35])
    assert curves(runs)[1]["top1"] == pytest.approx([50])
    assert best_top1(runs["c"]) == 1.0
    assert [row["lr"] for row in by_rate(runs)] == [0.1, 0.2, 0.5]


def test_a_page_has_both_numbers_and_what_diverged(tmp_path):
    rows = accuracies({"a": _run("vgg16", "nonorm", [0.31]), "b": _run("vgg16", "nonorm", [], "diverged")})
    data = {"item": "table1", "scale": "desk", "title": "t", "rows": rows, "verdicts": [], "runs": {"a": "k"}}
    text = section({**data, "missing": ["b"], "seconds": 7200.0})
    assert "| vgg16 | no norm | 68.97 ± 0.36 (unstable) | 31.00, 1 of 2 diverged |" in text
    assert "1 of 2 runs, 2.0 hours of training" in text
    assert page(tmp_path).startswith("# The paper, run again")


def test_curves_and_rates_on_a_page():
    rows = curves(
        {"a": _run("resnet18", "fixup", [0.1, 0.2, 0.3]), "b": _run("resnet18", "nonorm", [0.05], "diverged")}
    )
    data = {"title": "t", "scale": "desk", "verdicts": [], "runs": {}, "missing": [], "seconds": 60.0}
    text = section({"item": "figure-resnet-ablation", "rows": rows, **data})
    assert "| resnet18 | Fixup | 10.0 | 20.0 | 30.0 |" in text
    assert "| resnet18 | no norm | 5.0 | diverged | diverged |" in text
    rates = section({"item": "table2", "rows": by_rate({"a": _run("vgg16", "mimicnorm", [0.4])}), **data})
    assert f"| 0.1 | {TABLE2[0.1]['nonorm']:.1f} / - |" in rates
    assert "46.9 / 40.0" in rates


def test_a_cached_run_is_found_by_its_resolved_recipe(tmp_path):
    chosen = items.recipe("digits-mlp10", method="mimicnorm")
    same = items.recipe("digits-mlp10", method="mimicnorm", settings=("min_fan_in=12",))
    other = items.recipe("digits-mlp10", method="mimicnorm", settings=("min_fan_in=13",))
    assert cache_file(chosen, tmp_path) == cache_file(same, tmp_path) != cache_file(other, tmp_path)


def test_committed_runs_are_readable():
    folder = Path(__file__).parents[2] / "results" / "runs"
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        assert run["status"] in ("done", "diverged"), path.name
        assert run["history"] or run["status"] == "diverged", path.name


def test_importing_the_command_does_not_load_torch_for_a_misspelled_item():
    assert "mimicnorm.paper" in sys.modules  # loaded above; the command itself imports it only when it runs
