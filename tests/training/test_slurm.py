"""Runs as submitit's jobs, on its local executor."""

import pytest
import tiny

from mimicnorm.errors import CheckpointError, RecipeError
from mimicnorm.training import run_all, sweep
from mimicnorm.training.slurm import Slurm, Submitted


@pytest.fixture
def launcher(tmp_path):
    return Slurm(tmp_path / "jobs", gpus=0, cluster="local")


def test_a_sweep_trains_by_jobs(tmp_path, launcher):
    results = dict(run_all({"a": tiny.digits()}, tmp_path / "runs", launcher=launcher))
    assert results["a"].status == "done"
    assert dict(run_all({"a": tiny.digits()}, tmp_path / "runs", launcher=launcher)) == results


def test_a_job_that_fails_is_told_by_what_it_wrote(tmp_path, launcher):
    with pytest.raises(CheckpointError, match="failed: no train"):
        list(run_all({"a": tiny.digits(data="cifar100")}, tmp_path / "runs", data_dir=tmp_path, launcher=launcher))


def test_what_cannot_be_submitted_is_said(tmp_path):
    for option in ("partition", "=gpu"):
        with pytest.raises(RecipeError, match="NAME=VALUE"):
            Slurm(tmp_path, options=[option], cluster="local")
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


def test_several_gpus_train_one_run_together(tmp_path):
    alone, together = (sweep._command(tmp_path, tiny.digits(), None, "auto", gpus) for gpus in (1, 4))
    assert ("--nproc-per-node=4" in alone, "--nproc-per-node=4" in together) == (False, True)
    assert together[together.index("mimicnorm") + 1] == "train"
