"""One process or two: the same run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from mimicnorm.errors import RecipeError
from mimicnorm.training import network, step
from mimicnorm.training.processes import Processes, init_process_group

TWENTY_STEPS = {"model": "tiny:dry", "batch": 7, "epochs": 3, "milestones": [2 / 3]}  # shares of 4 and 3


def apart(a: Path, b: Path) -> float:
    """The largest difference between two runs' weights and statistics."""
    one, two = (load_file(p / "weights.safetensors") for p in (a, b))
    assert one.keys() == two.keys()
    return max(float((one[k].double() - two[k].double()).abs().max()) for k in one)


@pytest.mark.parametrize(
    "changes",
    [{"method": "mimicnorm"}, {"method": "mimicnorm", "activation_bits": 32, "micro_batch": 2}],
    ids=["whole batches", "micro-batches and 32 activation bits"],
)
def test_two_processes_give_the_weights_of_one(tmp_path: Path, changes):
    settings = {**TWENTY_STEPS, **changes}
    tiny.train(tmp_path / "one", **settings)
    assert tiny.together(2, tmp_path / "two", **settings) == [0, 0]
    assert json.loads((tmp_path / "one" / "result.json").read_text())["step"] == 24
    assert apart(tmp_path / "one", tmp_path / "two") <= 1e-4
    said = [(tmp_path / f"two.{rank}").read_text() for rank in range(2)]
    assert said[0] == said[1]
    assert said[0].startswith("done 24")


def test_rounded_activations_on_two_processes(tmp_path: Path):
    """Each process rounds its own share: after a step, weights are near those of one process and not equal to them."""
    settings = {**TWENTY_STEPS, "model": "tiny:wide", "activation_bits": 4, "batch": 48, "epochs": 1, "warmup": 0.0}
    tiny.train(tmp_path / "one", **settings)
    assert tiny.together(2, tmp_path / "two", **settings) == [0, 0]
    assert 1e-6 < apart(tmp_path / "one", tmp_path / "two") < 0.02


def test_batch_norm_on_two_processes_runs_on_each_ones_share(tmp_path: Path):
    settings = {**TWENTY_STEPS, "method": "batchnorm"}
    tiny.train(tmp_path / "one", **settings)
    assert tiny.together(2, tmp_path / "two", **settings) == [0, 0]
    assert apart(tmp_path / "one", tmp_path / "two") > 1e-3


def test_all_processes_agree_on_divergence_and_errors(tmp_path: Path):
    worse = {"method": "nonorm", "lr": 1e20, "warmup": 0.0}
    for micro_batch in (0, 3):
        out = tmp_path / str(micro_batch)
        assert tiny.together(2, out, **worse, micro_batch=micro_batch) == [0, 0]
        assert {Path(f"{out}.{rank}").read_text() for rank in range(2)} == {"diverged 2 None"}
    assert tiny.together(2, out, **worse, micro_batch=3, seed=1) == [1, 1]  # another recipe: no process waits


WORKER = """
import os, signal, sys
sys.path.insert(0, {here!r})
import tiny, torch
torch.set_num_threads(1)
step = tiny.loop.Trainer.step
def killed(self, images, labels, now):
    if now == 10 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, images, labels, now)
tiny.loop.Trainer.step = killed
tiny.train({out!r}, model="tiny:dry")
"""


@pytest.mark.slow
def test_torchrun_restarts_after_a_killed_worker_and_goes_on(tmp_path: Path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(here=str(Path(__file__).parent), out=str(tmp_path / "killed")))
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.2"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(worker)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert tiny.together(2, tmp_path / "whole", model="tiny:dry") == [0, 0]
    assert tiny.outcome(tmp_path / "killed") == tiny.outcome(tmp_path / "whole")


def test_sums_are_double_on_the_host():
    on_device = types.SimpleNamespace(cpu=lambda: torch.tensor([2**24 + 1]))  # not every device has doubles
    assert Processes(torch.device("cpu")).sum(on_device).tolist() == [2**24 + 1.0]


@pytest.mark.parametrize(("name", "reason"), [("nowhere", ""), ("cuda", ": torch finds no GPU here")])
def test_a_device_that_is_not_there_is_an_error(name, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RecipeError, match=f"device '{name}' cannot be used{reason}"), init_process_group(name):
        pass


@pytest.mark.parametrize(("name", "expected"), [("auto", "cuda:3"), ("cuda", "cuda:3"), ("cuda:1", "cuda:1")])
def test_each_process_sets_its_gpu_before_it_touches_cuda(monkeypatch, name, expected):
    """Otherwise every process of a machine would open a context on the first GPU."""
    touched = []

    class Zeros:
        def item(self):
            return 0

    def zeros(_, device):
        touched.append(("tensor on", str(device)))
        return Zeros()

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: touched.append(("current is", str(device))))
    monkeypatch.setattr(torch, "zeros", zeros)
    with init_process_group(name) as processes:
        assert str(processes.device) == expected
    assert touched == [("current is", expected), ("tensor on", expected)]


def test_a_compiled_network_is_wrapped_for_several_processes_not_the_other_way_round(monkeypatch):
    wrapped = []
    monkeypatch.setattr(torch, "compile", lambda model: ("compiled", model))
    monkeypatch.setattr(step, "DistributedDataParallel", lambda model, **_: wrapped.append(model) or "ddp")
    r = tiny.recipe(compile=True)
    trainer = step.Trainer(r, network(r, tiny.SOURCES[0]), Processes(torch.device("cpu"), 0, 2), 21)
    assert trainer.model == "ddp"
    assert wrapped == [("compiled", trainer.bare)]
