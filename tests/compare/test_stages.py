from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import small

from mimicnorm.compare import run, stages, summary
from mimicnorm.errors import MimicNormError
from mimicnorm.training import sweep
from mimicnorm.training.state import lock


@pytest.fixture
def copied(compared, tmp_path):
    """A copy of the finished comparison."""
    return shutil.copytree(compared[0], tmp_path / "copy")


def test_every_method_has_accuracy_memory_time_and_a_plan(compared):
    _, data = compared
    assert data["schema"] == 1
    assert data["status"] == "done"
    sizes = {key: value for key, value in data["data"].items() if key != "fingerprints"}
    assert sizes == {"train": 48, "test": 40, "classes": 10, "shape": [1, 8, 8]}
    by_label = {m["label"]: m for m in data["methods"]}
    assert [len(m["runs"]) for m in by_label.values()] == [2, 2, 1]
    assert by_label["nonorm"]["accuracy"]["sd"] is None
    assert by_label["nonorm"]["accuracy"]["difference"] is None
    interval = by_label["mimicnorm"]["accuracy"]["difference"]
    assert interval["low"] <= interval["value"] <= interval["high"]
    assert by_label["mimicnorm"]["memory"]["saved_ratio"] < 0.6
    assert by_label["batchnorm"]["time"]["ratio"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert by_label["mimicnorm"]["time"]["rounds"] == 5
    assert any("last norm" in row for row in by_label["mimicnorm"]["plan"]["rows"])
    for m in data["methods"]:
        values = [r["top1"] for r in m["runs"]]
        assert m["accuracy"]["mean"] == pytest.approx(sum(values) / len(values))
        ends = [r["history"][-1] for r in m["runs"]]
        assert [end["top1"] for end in ends] == values
        for name in ("test_loss", "confidence", "calibration_error"):
            assert m["calibration"][name]["mean"] == pytest.approx(sum(end[name] for end in ends) / len(ends))


def test_methods_that_are_left_out_come_back_and_the_same_call_again_trains_nothing(
    compared, copied, capsys, trains_nothing
):
    before = compared[1]["methods"]
    assert run(small.job(), copied, progress=False)["methods"] == before  # with the times
    run(small.job("batchnorm,nonorm:1", rounds=0), copied)
    assert f"left out this time: mimicnorm. Their runs stay in {copied} and come back" in capsys.readouterr().out
    again = run(small.job(rounds=0), copied, progress=False)
    assert [m["runs"] for m in again["methods"]] == [m["runs"] for m in before]


def test_more_methods_and_seeds_are_added(copied, trains_here):
    (before,) = copied.glob("batchnorm-seed0-*/result.json")
    made = before.stat().st_mtime_ns
    data = run(small.job("batchnorm,last-bn:1", rounds=0), copied, progress=False)
    assert before.stat().st_mtime_ns == made
    assert [len(m["runs"]) for m in data["methods"]] == [2, 1]
    assert data["methods"][0]["time"] is None
    assert list(copied.glob("last-bn-seed0-*"))


def test_other_settings_need_another_folder(compared, converts_nothing):
    with pytest.raises(MimicNormError, match=r"other settings: epochs was 1 and is 2.*--out"):
        run(small.job(epochs=2), compared[0], progress=False)


def test_other_data_of_the_same_size_needs_another_folder(copied, monkeypatch, converts_nothing):
    """The comparison knows its data, and so does every finished run in it."""
    train_set, test_set = stages.load(small.job().recipe)
    train_set.images[3] = 0
    monkeypatch.setattr(stages, "load", lambda *_: (train_set, test_set))
    for _ in range(2):
        with pytest.raises(MimicNormError, match=r"other data: training.* was .* and is "):
            run(small.job(), copied, progress=False)
        (copied / "compare.json").unlink(missing_ok=True)


def test_divergence_is_a_result(tmp_path, trains_here):
    data = run(small.job("batchnorm:1,nonorm:1", rounds=0, lr=1e30, warmup=0.0), tmp_path, progress=False)
    diverged = data["methods"][1]
    assert data["status"] == "done"
    assert diverged["calibration"] is None
    assert diverged["accuracy"] == {"mean": None, "sd": None, "runs": 0, "diverged": 1, "difference": None}
    assert f"1 of 1 diverged (step {diverged['runs'][0]['step']})" in (tmp_path / "report.html").read_text()


def test_a_method_that_the_network_cannot_take_is_named_before_anything_is_trained(tmp_path):
    with pytest.raises(MimicNormError, match=r"fixup cannot be applied to vgg11: .*Nothing was trained"):
        run(small.job("batchnorm,fixup", model="vgg11"), tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_or_written(tmp_path, copied, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(MimicNormError, match="cannot write to the folder"):
        run(small.job("batchnorm"), tmp_path / "file" / "out", progress=False)
    before = (copied / "report.html").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MimicNormError, match=r"cannot write .*: No space left on device"):
        run(small.job(), copied, progress=False)
    assert (copied / "report.html").read_bytes() == before
    assert not list(copied.glob(".*.partial"))


def test_rates_that_were_found_are_kept_when_the_search_is_interrupted(tmp_path, monkeypatch, trains_here):
    asked = []

    def search(recipe, *_):
        asked.append(recipe.method)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return {"value": 0.1, "steps": 1, "at_least": False}

    monkeypatch.setattr(stages, "largest_lr", search)
    job = dataclasses.replace(small.job("batchnorm:1,nonorm:1", rounds=0), largest_lr=True)
    assert run(job, tmp_path, progress=False)["status"] == "interrupted"
    assert run(job, tmp_path, progress=False)["status"] == "done"
    assert asked == ["batchnorm", "nonorm", "nonorm"]


def test_other_rounds_are_timed_anew_and_the_page_stays_whole_meanwhile(compared, copied, monkeypatch):
    seen = []

    def times(trainers, source, rounds):
        seen.append((rounds, json.loads((copied / "compare.json").read_text())))
        return dict.fromkeys(trainers)

    monkeypatch.setattr(stages, "times", times)
    run(small.job(), copied, progress=False)
    assert not seen
    run(small.job(rounds=9), copied, progress=False)
    (rounds, meanwhile), *more = seen
    assert (rounds, more) == (9, [])
    for before, now in zip(compared[1]["methods"], meanwhile["methods"], strict=True):
        assert (now["runs"], now["accuracy"]) == (before["runs"], before["accuracy"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data.pop("methods"), "'methods' is missing"),
        (lambda data: data.update(schema=7), "schema 7"),
        (lambda data: data.update(data=5), "not subscriptable"),
        (lambda data: data.update(methods=[3]), "not subscriptable"),
        (lambda data: data["methods"][0].pop("time"), "'time' is missing"),
        (lambda data: data["methods"][0]["time"].pop("ratio"), "'ratio' is missing"),
        (lambda data: data["methods"][0].update(time="x"), ""),
        (None, ""),
    ],
)
def test_a_damaged_json_is_an_error_that_says_what_to_do(compared, tmp_path, damage, message):
    data = json.loads((compared[0] / "compare.json").read_text())
    now = json.loads(json.dumps(data))
    (tmp_path / "compare.json").write_text("{" if damage is None else (damage(data), json.dumps(data))[1])
    with pytest.raises(MimicNormError, match=rf"compare.json is damaged \(.*{message}.*Delete it"):
        summary.add_earlier(now, tmp_path)


def test_two_comparisons_in_one_folder_are_refused(tmp_path, converts_nothing):
    code = (
        "import fcntl, sys\nfile = open('.lock', 'w')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\nprint(flush=True), sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, **pipes) as other:
        other.stdout.readline()
        with pytest.raises(MimicNormError, match=f"another process is comparing in {tmp_path}"):
            run(small.job("batchnorm"), tmp_path, progress=False)
        other.stdin.close()
    with lock(tmp_path, "comparing"):
        assert os.listdir(tmp_path) == [".lock"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_page_is_written_ends_the_training_processes(tmp_path, monkeypatch, number):
    class Endless:
        """A training process that ends when it is told to; the first one is done at once."""

        def __init__(self, command, environment, errors, quiet):
            self.returncode = None
            processes.append(self)
            if len(processes) == 1:
                (errors.parent / "result.json").write_text(json.dumps({"status": "diverged", "step": 7}))
                self.returncode = 0

        def poll(self):
            return self.returncode

        def terminate(self):
            self.returncode = 143

        wait = poll

    def write(data, out):
        write_page(data, out)
        if data["status"] == "interrupted":
            assert [process.returncode for process in processes] == [0, 143], "stopped before anything else is done"
        if any(m["runs"] for m in data["methods"]) and data["status"] == "running":
            assert [process.returncode for process in processes] == [0, None]
            os.kill(os.getpid(), number)
            time.sleep(10)

    processes, write_page, before = [], summary.write, signal.getsignal(signal.SIGTERM)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without it
    monkeypatch.setattr(sweep, "_start", Endless)
    monkeypatch.setattr(summary, "write", write)
    try:
        data = run(small.job("batchnorm", rounds=0), tmp_path, jobs=2, progress=False)
    finally:
        signal.signal(signal.SIGINT, interrupt)
    assert (data["status"], data["signal"]) == ("interrupted", number)
    assert [process.returncode for process in processes] == [0, 143]
    assert signal.getsignal(signal.SIGTERM) is before
    assert json.loads((tmp_path / "compare.json").read_text()) == data
    assert "1 of 2 runs are in" in (tmp_path / "report.html").read_text()


def test_real_processes_give_the_same_accuracies(tmp_path, compared):
    data = run(small.job("batchnorm:1", rounds=0), tmp_path, progress=False)
    assert data["methods"][0]["runs"][0]["top1"] == compared[1]["methods"][0]["runs"][0]["top1"]
