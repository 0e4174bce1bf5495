"""What a prediction is for: the CPU with its convolutions' copies, or a GPU, which need not be there."""

import json

import pytest
import torch
from torch import nn

from mimicnorm.cli import main
from mimicnorm.errors import MemoryPredictionError
from mimicnorm.memory import compare, largest_batch, measure, tracker

SHAPE = (4, 16, 12, 12)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(16, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def without_workspaces(monkeypatch, **how):
    with monkeypatch.context() as patched:
        patched.setattr(tracker, "workspace_bytes", lambda *_: 0)
        return measure(network(), SHAPE, **how)


@pytest.mark.parametrize("optimizer", [None, "sgd-momentum"])
def test_copies_inside_convolutions_are_the_cpus_alone(monkeypatch, optimizer):
    on_cpu, on_gpu = (measure(network(), SHAPE, optimizer=optimizer, device=d) for d in ("cpu", "cuda"))
    assert on_cpu.as_dict() == measure(network(), SHAPE, optimizer=optimizer).as_dict()
    assert on_gpu.peak_bytes == without_workspaces(monkeypatch, optimizer=optimizer).peak_bytes < on_cpu.peak_bytes
    assert on_gpu.saved_bytes == on_cpu.saved_bytes
    assert (on_cpu.device, on_gpu.device) == ("cpu", "cuda")


def test_optimizers_work_on_all_parameters_at_once_on_a_gpu(monkeypatch):
    for_gpu = measure(network(), SHAPE, optimizer="adamw", device="cuda:1")
    at_once, in_turn = (
        without_workspaces(monkeypatch, optimizer=lambda p, at_once=at_once: torch.optim.AdamW(p, foreach=at_once))
        for at_once in (True, False)
    )
    assert for_gpu.timeline == at_once.timeline
    assert for_gpu.timeline != in_turn.timeline
    own = measure(network(), SHAPE, device="cuda", optimizer=lambda p: torch.optim.AdamW(p, foreach=False))
    assert own.timeline == in_turn.timeline  # what the user says counts


def test_a_network_without_memory_is_predicted_for_a_gpu():
    empty = network().to("meta")
    assert measure(empty, SHAPE, device="cuda").as_dict() == measure(network(), SHAPE, device="cuda").as_dict()
    with pytest.raises(MemoryPredictionError, match=r"device='cpu', but the model is on meta: move it first"):
        measure(empty, SHAPE, device="cpu")
    with pytest.raises(MemoryPredictionError, match=r"there is no autocast on meta, where the model is"):
        measure(empty, SHAPE, autocast=torch.bfloat16)


@pytest.mark.parametrize("attempt", [measure, compare, lambda m, x, **how: largest_batch(m, x, "1 GiB", **how)])
@pytest.mark.parametrize("device", ["gpu", 3.5, "meta"])
def test_what_is_no_device_is_refused(attempt, device):
    with pytest.raises(MemoryPredictionError, match=r"device=.*(give 'cpu', 'cuda' or None|the model is on cpu)"):
        attempt(network(), SHAPE, device=device)


def test_a_real_step_runs_where_the_model_is():
    assert measure(network(), SHAPE, fake=False, device="cpu").device == "cpu"
    with pytest.raises(MemoryPredictionError, match=r"device='cuda', but the model is on cpu, and fake=False runs"):
        measure(network(), SHAPE, fake=False, device="cuda")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.float64, torch.complex64, torch.bool, "bf16", 16])
def test_a_type_that_autocast_does_not_run_in_is_refused(dtype):
    """Torch warns and runs without autocast: the prediction would be that of fp32."""
    for attempt in (measure, compare):
        with pytest.raises(MemoryPredictionError, match=r"autocast=.*runs in torch.bfloat16 or torch.float16"):
            attempt(network(), SHAPE, autocast=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_halves_are_taken(dtype):
    assert measure(network(), SHAPE, autocast=dtype).saved_bytes < 0.8 * measure(network(), SHAPE).saved_bytes


def test_other_arguments_that_mean_nothing_are_refused():
    with pytest.raises(MemoryPredictionError, match="fake='no': give True or False"):
        measure(network(), SHAPE, fake="no")
    analysis = measure(network(), SHAPE)
    for attempt, wrong in ((analysis.by_module, -1), (analysis.by_module, "1"), (analysis.module_table, 1.5)):
        with pytest.raises(MemoryPredictionError, match="give a whole number from 0 on"):
            attempt(wrong)
    with pytest.raises(MemoryPredictionError, match="rows=-1: give a whole number from 0 on"):
        analysis.module_table(rows=-1)
    assert analysis.by_module(0) == {"(model)": analysis.saved_bytes}


def test_methods_are_compared_for_a_device_and_the_table_says_for_which():
    methods = ["batchnorm", "nonorm"]
    on_cpu, on_gpu = (compare(network(), SHAPE, methods, device=d, budget="8 MiB") for d in ("cpu", "cuda"))
    assert on_gpu.peak_ratio("nonorm") != on_cpu.peak_ratio("nonorm")
    assert on_gpu.largest_batches["nonorm"] > on_cpu.largest_batches["nonorm"]
    note = "workspaces inside the kernels of cuda (cuDNN's convolutions) are not counted"
    for shown in (on_gpu, on_gpu.analyses["nonorm"]):
        text = " ".join(str(shown).split())
        assert "batch 4, on cuda" in text
        assert note in text
    for shown in (on_cpu, on_cpu.analyses["nonorm"]):
        text = " ".join(str(shown).split())
        assert "batch 4, on cpu" in text
        assert "not counted" not in text
    assert on_gpu.as_dict()["device"] == on_gpu.as_dict()["methods"]["nonorm"]["device"] == "cuda"


def test_the_command_predicts_for_a_device(capsys, monkeypatch):
    words = [
        "memory",
        "resnet10",
        "--input",
        "cifar",
        "--width",
        "0.25",
        "--batch",
        "4",
        "--methods",
        "batchnorm",
        "--json",
    ]

    def printed(*more: str) -> dict:
        assert main([*words, *more]) == 0
        return json.loads(capsys.readouterr().out)

    assert printed()["device"] == printed("--device", "cpu")["device"] == "cpu"
    for_gpu = printed("--device", "cuda")
    assert for_gpu["device"] == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert printed() == for_gpu
    assert main([*words, "--device", "cuda", "--no-fake"]) == 2
    assert "--no-fake runs the step on cuda, which cannot be used" in capsys.readouterr().err
