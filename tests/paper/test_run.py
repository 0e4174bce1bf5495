"""An item end to end on a small scale: cached, resumed, judged, on a page; and the command around it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mimicnorm.cli import main
from mimicnorm.paper import ITEMS, SCALES, page, reproduce, scales, tables
from mimicnorm.paper.published import ITEM_NAMES
from mimicnorm.paper.scales import Scale

TINY = {"model": "mlp10", "limit": 64, "test_limit": 32, "epochs": 2, "batch": 32, "log_every": 1}


class _Digits(Scale):
    """Every recipe on digits, a second each."""

    def recipe(self, data, network, method, /, **changes):
        fields = {k: v for k, v in changes.items() if k in ("lr", "seed")}
        return scales.recipe("digits-mlp10", method=method, **TINY, **fields)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    _shrink(monkeypatch)


def _shrink(monkeypatch):
    monkeypatch.setitem(SCALES, "desk", _Digits("desk", default=1))
    monkeypatch.setattr(tables, "TABLE2", {0.2: dict.fromkeys(("nonorm", "batchnorm"))})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train both runs once for all tests."""
    folder = tmp_path_factory.mktemp("reproduce")
    with pytest.MonkeyPatch.context() as patch:
        _shrink(patch)
        reproduce("table2", results=folder / "results", runs=folder / "runs")
    return folder


@pytest.fixture
def where(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return {"results": tmp_path / "results", "runs": tmp_path / "runs"}


@pytest.fixture
def never_trained(monkeypatch):
    monkeypatch.setattr("mimicnorm.training.sweep._start", lambda *_, **__: pytest.fail("trained again"))


@pytest.mark.usefixtures("never_trained")
def test_a_second_call_reads_the_cache_and_gives_the_same_file(where):
    path = where["results"] / "paper" / "table2-desk.json"
    first = json.loads(path.read_text())
    assert len(first["runs"]) == 2
    assert not first["missing"]
    assert tuple(ITEMS) == ITEM_NAMES
    assert [sorted(row) for row in first["rows"]] == [["batchnorm", "lr", "nonorm"]]
    assert reproduce("table2", **where) == first
    assert json.loads(path.read_text()) == first


def test_a_run_that_is_missing_is_trained_and_the_others_are_not(where):
    folder = where["results"] / "runs"
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    missing = min(folder.iterdir())
    missing.unlink()
    judged = reproduce("table2", **where, only_finished=True)
    assert (len(judged["runs"]), len(judged["missing"])) == (1, 1)
    shutil.rmtree(next(where["runs"].glob(f"*-{missing.stem}")))
    assert missing.stem in reproduce("table2", **where)["runs"].values()
    after = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {missing.name}


@pytest.mark.usefixtures("never_trained")
def test_a_trial_of_a_few_steps_is_not_on_the_page(where):
    data = reproduce("table2", **where, max_steps=2)
    assert data["max_steps"] == 2
    assert (where["results"] / "paper" / "table2-desk-2-steps.json").exists()
    assert page.markdown(where["results"]).count("## table2") == 1


@pytest.mark.usefixtures("where", "never_trained")
def test_the_command_prints_verdicts_and_writes_the_page(tmp_path, capsys):
    options = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    assert main(["reproduce", "table2", *options]) == 0
    assert "undecided" in capsys.readouterr().out
    assert "## table2" in (tmp_path / "results" / "paper" / "results.md").read_text()
    assert "<h2>table2" in (tmp_path / "results" / "paper" / "results.html").read_text()
    assert main(["reproduce", "list", *options]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ITEMS)


@pytest.mark.slow
def test_table3_needs_gpus_and_predicts_memory(tmp_path):
    data = reproduce("table3", results=tmp_path, runs=tmp_path / "runs")
    assert data["verdicts"][0]["verdict"] == "needs GPUs, recipe ready"
    assert len(data["missing"]) == 12
    assert all(row["peak_mib"] > 100 for row in data["rows"])


def test_mistakes_are_messages(capsys):
    for words, expected in ((["table4"], "table1"), (["table1", "--jobs", "0"], "--jobs")):
        assert main(["reproduce", *words]) == 2
        assert expected in capsys.readouterr().err


def test_an_unknown_item_is_refused_before_torch_is_imported():
    code = "import sys; from mimicnorm.cli import main; main(['reproduce', 'tabel1']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "table1" in done.stderr


def test_committed_runs_are_readable():
    folder = Path(__file__).parents[2] / "results" / "runs"
    paths = sorted(folder.glob("*.json"))
    assert paths
    for path in paths:
        run = json.loads(path.read_text())
        assert run["status"] in ("done", "diverged"), path.name
        assert run["history"] or run["status"] == "diverged", path.name
