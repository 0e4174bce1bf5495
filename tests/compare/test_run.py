from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import small

from mimicnorm.compare import run, runs
from mimicnorm.errors import MimicNormError
from mimicnorm.training.step import Trainer


def folders(out):
    return sorted(path.name for path in out.iterdir() if path.is_dir())


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
        assert [r["history"][-1]["top1"] for r in m["runs"]] == values


def test_the_same_call_again_trains_nothing_and_keeps_the_times(compared, monkeypatch):
    out, before = compared
    monkeypatch.setattr(Trainer, "step", lambda *_: pytest.fail("a step was taken"))
    assert run(small.job(), out, progress=False)["methods"] == before["methods"]


def test_more_methods_and_seeds_are_added(compared, tmp_path):
    out = tmp_path / "more"
    shutil.copytree(compared[0], out)
    kept = (out / "batchnorm-seed0" / "result.json").stat().st_mtime_ns
    data = run(small.job("batchnorm,last-bn:1", rounds=0), out, progress=False)
    assert (out / "batchnorm-seed0" / "result.json").stat().st_mtime_ns == kept
    assert [len(m["runs"]) for m in data["methods"]] == [2, 1]
    assert data["methods"][0]["time"] is None
    assert "last-bn-seed0" in folders(out)


def test_other_settings_need_another_folder(compared):
    with pytest.raises(MimicNormError, match=r"other settings: epochs was 1 and is 2.*--out"):
        run(small.job(epochs=2), compared[0], progress=False)


@pytest.mark.parametrize("without", ["nothing", "compare.json", "*/data.json"])
def test_other_data_of_the_same_size_needs_another_folder(compared, tmp_path, monkeypatch, without):
    """The comparison knows its data, and so does every finished run in it."""
    out = tmp_path / "other"
    shutil.copytree(compared[0], out)
    for path in out.glob(without):
        path.unlink()
    module, job = sys.modules["mimicnorm.compare.run"], small.job()
    train_set, test_set = module.load(job.recipe)
    train_set.images[3] = 0
    monkeypatch.setattr(module, "load", lambda *_: (train_set, test_set))
    with pytest.raises(MimicNormError, match=r"other data: the fingerprint of the training images was"):
        run(job, out, progress=False)


def test_folders_of_an_older_version_have_no_fingerprints_and_go_on(compared, tmp_path, monkeypatch):
    out = tmp_path / "older"
    shutil.copytree(compared[0], out)
    data = json.loads((out / "compare.json").read_text())
    del data["data"]["fingerprints"]
    (out / "compare.json").write_text(json.dumps(data))
    for path in out.glob("*/data.json"):
        path.unlink()
    monkeypatch.setattr(Trainer, "step", lambda *_: pytest.fail("a step was taken"))
    assert run(small.job(), out, progress=False)["data"] == compared[1]["data"]


def test_ctrl_c_keeps_what_is_there_and_the_same_call_goes_on(tmp_path, monkeypatch, compared):
    step, taken = Trainer.step, []

    def interrupted(self, *args):
        taken.append(1)
        if len(taken) == 5:  # in the second run
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args)

    job = small.job(rounds=0)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", interrupted)
        data = run(job, tmp_path, progress=False)
    assert (data["status"], data["signal"]) == ("interrupted", signal.SIGINT)
    assert json.loads((tmp_path / "compare.json").read_text()) == data
    assert [len(m["runs"]) for m in data["methods"]] == [1, 0, 0]
    assert "1 of 5 runs are in" in (tmp_path / "report.html").read_text()
    done = run(job, tmp_path, progress=False)
    assert done["status"] == "done"
    for there, here in zip(compared[1]["methods"], done["methods"], strict=True):  # as if never interrupted
        assert [r["top1"] for r in here["runs"]] == [r["top1"] for r in there["runs"]]


def test_divergence_is_a_result(tmp_path):
    data = run(small.job("batchnorm:1,nonorm:1", rounds=0, lr=1e30, warmup_epochs=0.0), tmp_path, progress=False)
    lost = data["methods"][1]
    assert data["status"] == "done"
    assert lost["accuracy"] == {"mean": None, "sd": None, "runs": 0, "diverged": 1, "difference": None}
    assert f"1 of 1 diverged (step {lost['runs'][0]['step']})" in (tmp_path / "report.html").read_text()


def test_a_method_that_the_network_cannot_take_is_said_before_anything_is_trained(tmp_path):
    with pytest.raises(MimicNormError, match=r"fixup cannot be applied to vgg11: .*Nothing was trained"):
        run(small.job("batchnorm,fixup", model="vgg11"), tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_or_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MimicNormError, match="cannot make the folder"):
        run(small.job("batchnorm"), tmp_path / "file" / "out", progress=False)


def test_no_space_for_the_page_is_one_sentence(tmp_path, monkeypatch, compared):
    out = tmp_path / "full"
    shutil.copytree(compared[0], out)
    before = (out / "report.html").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MimicNormError, match=r"cannot write .*: No space left on device"):
        run(small.job(), out, progress=False)
    assert (out / "report.html").read_bytes() == before
    assert not list(out.glob(".*.partial"))


def test_several_runs_at_once_give_the_same_accuracies(tmp_path, compared):
    data = run(small.job("batchnorm", rounds=0), tmp_path, jobs=2, progress=False)
    assert [r["seed"] for r in data["methods"][0]["runs"]] == [0, 1]
    assert [r["top1"] for r in data["methods"][0]["runs"]] == [r["top1"] for r in compared[1]["methods"][0]["runs"]]


def in_the_midst_of_training(out, act):
    """Do something once a run in a process of its own has saved."""

    def watch():
        while not list(out.glob("*/checkpoints/*")):
            time.sleep(0.05)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_a_killed_training_process_is_one_sentence_and_the_others_save(tmp_path):
    def kill_one():
        child = next(c for c in multiprocessing.active_children() if c.pid)
        os.kill(child.pid, signal.SIGKILL)

    thread = in_the_midst_of_training(tmp_path, kill_one)
    with pytest.raises(MimicNormError, match=r"was killed from outside.*--jobs 1 needs less"):
        run(small.job("batchnorm", rounds=0, epochs=5000), tmp_path, jobs=2, progress=False)
    thread.join()
    assert not multiprocessing.active_children()


def test_sigterm_reaches_every_training_process(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    thread = in_the_midst_of_training(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM))
    data = run(small.job("batchnorm", rounds=0, epochs=5000), tmp_path, jobs=2, progress=False)
    thread.join()
    assert (data["status"], data["signal"]) == ("interrupted", signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not multiprocessing.active_children()


def test_rates_that_were_found_are_kept_when_the_search_is_interrupted(tmp_path, monkeypatch):
    asked = []

    def search(job, contestant, *_):
        asked.append(contestant.label)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return {"value": 0.1, "steps": 1, "at_least": False}

    monkeypatch.setattr(sys.modules["mimicnorm.compare.run"], "largest_lr", search)  # the package's run is a function
    job = dataclasses.replace(small.job("batchnorm:1,nonorm:1", rounds=0), largest_lr=True)
    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path, progress=False)
    assert run(job, tmp_path, progress=False)["status"] == "done"
    assert asked == ["batchnorm", "nonorm", "nonorm"]


def test_the_folder_of_a_run_names_method_and_seed(compared):
    out, data = compared
    assert folders(out) == sorted(r["folder"] for m in data["methods"] for r in m["runs"])
    assert runs.folder_of(small.job().contestants[2], 0) == "nonorm-seed0"


def test_what_the_width_changed_is_said_and_other_defaults_need_another_folder(compared, tmp_path, capsys):
    out = tmp_path / "again"
    shutil.copytree(compared[0], out)
    data = run(small.job(), out)
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith("applying batchnorm, mimicnorm (min_fan_in=6 at width 0.125), nonorm")
    assert [m["note"] for m in data["methods"]] == ["", "min_fan_in=6 at width 0.125", ""]
    assert "Here min_fan_in=6 at width 0.125." in (out / "report.html").read_text()
    data["methods"][1]["plan"]["method"]["min_fan_in"] = 50  # as an earlier version had it
    (out / "compare.json").write_text(json.dumps(data))
    with pytest.raises(MimicNormError, match=r"another mimicnorm: min_fan_in was 50 and is 6.*--out"):
        run(small.job(), out, progress=False)


def test_methods_that_are_left_out_are_named_and_come_back(compared, tmp_path, capsys, monkeypatch):
    out = tmp_path / "fewer"
    shutil.copytree(compared[0], out)
    monkeypatch.setattr(Trainer, "step", lambda *_: pytest.fail("a step was taken"))
    run(small.job("batchnorm,nonorm:1", rounds=0), out)
    assert f"left out this time: mimicnorm. Their runs stay in {out} and come back" in capsys.readouterr().out
    again = run(small.job(rounds=0), out, progress=False)
    assert [m["runs"] for m in again["methods"]] == [m["runs"] for m in compared[1]["methods"]]


def test_other_rounds_are_timed_anew_and_the_page_stays_whole_meanwhile(compared, tmp_path, monkeypatch):
    out = tmp_path / "rounds"
    shutil.copytree(compared[0], out)
    seen = []

    def times(job, *_):
        seen.append((job.rounds, json.loads((out / "compare.json").read_text())))
        return {}

    monkeypatch.setattr(sys.modules["mimicnorm.compare.run"], "times", times)
    run(small.job(), out, progress=False)
    assert not seen
    run(small.job(rounds=9), out, progress=False)
    (rounds, meanwhile), *more = seen
    assert (rounds, more) == (9, [])
    for before, now in zip(compared[1]["methods"], meanwhile["methods"], strict=True):
        assert (now["runs"], now["accuracy"]) == (before["runs"], before["accuracy"])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: data.pop("methods"), "'methods' is missing"),
        (lambda data: data.update(schema=7), "schema 7"),
        (lambda data: data["methods"][0].pop("plan"), "'plan' is missing"),
    ],
)
def test_a_spoilt_json_is_one_sentence(compared, tmp_path, spoil, says):
    data = json.loads((compared[0] / "compare.json").read_text())
    spoil(data)
    (tmp_path / "compare.json").write_text(json.dumps(data))
    with pytest.raises(MimicNormError, match=rf"compare.json cannot be read \(.*{says}.*--out"):
        run(small.job(), tmp_path, progress=False)


def test_training_processes_do_not_hear_ctrl_c(request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with runs._deaf_to_ctrl_c():
        code = "import signal, os; os.kill(os.getpid(), signal.SIGINT); print('deaf')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "deaf\n"
    with pytest.raises(KeyboardInterrupt), runs._deaf_to_ctrl_c():
        os.kill(os.getpid(), signal.SIGINT)
