"""Runs as submitit's jobs, on its local executor."""

import pytest

from mimicnorm.errors import CheckpointError, RecipeError
from mimicnorm.training import recipe, run_all, sweep
from mimicnorm.training.slurm import Slurm, Submitted


def small(**changes):
    fields = {"method": "batchnorm", "limit": 48, "test_limit": 40, "batch": 16, "epochs": 1, **changes}
    return recipe("digits-mlp10", **fields)


@pytest.fixture
def launcher(tmp_path):
    return Slurm(tmp_path / "jobs", gpus=0, cluster="local")


def test_a_sweep_trains_by_jobs(tmp_path, launcher):
    results = dict(run_all({"a": small(), "b": small(seed=1)}, tmp_path / "runs", jobs=2, launcher=launcher))
    assert {name: result.status for name, result in results.items()} == {"a": "done", "b": "done"}
    assert dict(run_all({"a": small()}, tmp_path / "runs", launcher=launcher))["a"] == results["a"]


def test_a_job_that_fails_is_told_by_what_it_wrote(tmp_path, launcher):
    with pytest.raises(CheckpointError, match="failed: no train"):
        list(run_all({"a": small(data="cifar100")}, tmp_path / "runs", data_dir=tmp_path, launcher=launcher))


@pytest.mark.parametrize("option", ["partition", "=gpu"])
def test_options_are_pairs(option, tmp_path):
    with pytest.raises(RecipeError, match="NAME=VALUE"):
        Slurm(tmp_path, options=[option], cluster="local")


def test_without_a_scheduler_the_error_says_so(tmp_path):
    with pytest.raises(RecipeError, match="cannot submit to slurm"):
        Slurm(tmp_path)


@pytest.mark.parametrize(
    ("count", "given", "expected"),
    [
        (0, None, {}),
        (1, None, {}),
        (4, None, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        (2, "5,7", {"CUDA_VISIBLE_DEVICES": "5,7"}),
    ],
)
def test_runs_here_have_gpus_of_their_own(count, given, expected, monkeypatch):
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert sweep._own_gpus(1, 2, "auto") == expected
    assert sweep._own_gpus(1, 2, "cpu") == {}


class _LostJob:
    def done(self, force_check=False):
        return True

    def exception(self):
        return RuntimeError("the node went away")


def test_a_job_that_never_ran_says_why(tmp_path):
    assert Submitted(_LostJob(), tmp_path / "errors.log").poll() == 1
    assert "the node went away" in (tmp_path / "errors.log").read_text()


@pytest.mark.parametrize(("gpus", "together"), [(1, False), (4, True)])
def test_several_gpus_train_one_run_together(gpus, together, tmp_path):
    command = sweep._command(tmp_path, small(), None, "auto", gpus)
    assert ("--nproc-per-node=4" in command) == together
    assert command[command.index("mimicnorm") + 1] == "train"
