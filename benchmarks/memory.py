"""The memory of training, predicted and measured; one JSON file in ``results/`` per part.

    python benchmarks/memory.py [ratios] [peak] [prediction] [alternatives] [inductor]

ratios        bytes saved for backward, converted / BatchNorm: five networks, eager, bf16 autocast, torch.compile
peak          ResNet-50 at batch 256 and the largest batch in 16 GiB, with the cost of predicting; one figure
prediction    predicted peak against the profiler's memory events of a real step on the CPU
alternatives  what else saves memory in a ResNet-50, with real time per step and real peak
inductor      what a real torch.compile run on the CPU saves, against the prediction
"""

from __future__ import annotations

import argparse
import copy
import gc
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from provenance import ROOT, Rows, provenance, save
from steps import checkpointed, ratio, really_saved, training_step
from torch import nn

from mimicnorm import memory
from mimicnorm.compare.timing import interleaved
from mimicnorm.methods import BatchNorm, MimicNorm
from mimicnorm.surgery.convert import convert

sys.path.insert(0, str(ROOT / "tests" / "memory"))

import zoo
from profiled_step import profiled_peak

MIB = 2**20
FIGURES = Path(ROOT, "docs", "figures")
THREE = ("batchnorm", "mimicnorm", "nonorm")
FIVE = ("resnet50", "resnet18", "vgg16_bn", "shufflenet_v2_x0_5", "densenet121")


def build(name: str, **settings) -> nn.Module:
    if name.startswith("timm:"):
        return zoo.timm().create_model(name.removeprefix("timm:"), **settings)
    if name in ("googlenet", "inception_v3"):
        settings |= {"init_weights": False, "aux_logits": False}
    return getattr(zoo.torchvision().models, name)(**settings)


# -- ratios ------------------------------------------------------------------------------------


def ratios() -> None:
    batch, image = 8, 224
    rows = Rows("memory-ratios", "network", "setting", batch=batch, image=image)
    for name in FIVE:
        for setting in ("eager", "bf16 autocast", "compile"):
            if (name, setting) in rows:
                continue
            model = build(name)
            if setting == "compile":
                model.compile()
            autocast = torch.bfloat16 if setting == "bf16 autocast" else None
            result = memory.compare(model, (batch, 3, image, image), THREE, autocast=autocast)
            saved = {method: analysis.saved_bytes_per_sample / MIB for method, analysis in result.analyses.items()}
            row = {
                "network": name,
                "setting": setting,
                "saved_mib_per_image": saved,
                "mimicnorm_over_batchnorm": saved["mimicnorm"] / saved["batchnorm"],
                "mimicnorm_over_nonorm": saved["mimicnorm"] / saved["nonorm"],
            }
            rows.add(row)


# -- peak --------------------------------------------------------------------------------------


def peak() -> None:
    batch, image, budget = 256, 224, "16 GiB"
    model = build("resnet50")
    start = time.process_time()
    memory.measure(model, (batch, 3, image, image))
    seconds = time.process_time() - start
    resident_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = memory.compare(model, (batch, 3, image, image), THREE, budget=budget)
    print(result)
    memory.plot(result, FIGURES / "memory-resnet50.png")
    rows = result.as_dict()
    for row in rows["methods"].values():
        row["by_module"] = result.analyses["batchnorm"].by_module(1) if row is rows["methods"]["batchnorm"] else None
    batches = result.largest_batches
    save(
        "memory-peak",
        provenance(network="resnet50", batch=batch, image=image, optimizer="sgd-momentum", budget=budget)
        | {
            "cpu_seconds_of_one_prediction": seconds,
            "resident_mib_of_the_process_after_it": resident_mib,
            "largest_batch_ratio": batches["mimicnorm"] / batches["batchnorm"],
            **rows,
        },
    )


# -- prediction --------------------------------------------------------------------------------

TEN = {
    "resnet18": 112,
    "resnet50": 112,
    "vgg11_bn": 64,
    "densenet121": 112,
    "shufflenet_v2_x0_5": 112,
    "mobilenet_v2": 112,
    "googlenet": 112,
    "efficientnet_b0": 112,
    "regnet_y_400mf": 112,
    "timm:repvgg_a0": 112,
    "resnet18 converted": 112,
    "mobilenet_v2 converted": 112,
}


def build_or_convert(name: str, image: int) -> nn.Module:
    plain, _, converted = name.partition(" ")
    model = build(plain)
    return convert(model, MimicNorm(), example=(2, 3, image, image), init=None) if converted else model


def prediction() -> None:
    rows = Rows("memory-prediction", "network", "batch", "optimizer")
    for name, image in TEN.items():
        model = build_or_convert(name, image)
        for optimizer in ("sgd-momentum", "adamw"):
            for batch in (8, 16, 32):
                if (name, batch, optimizer) in rows:
                    continue
                shape = (batch, 3, image, image)
                predicted = memory.measure(model, shape, optimizer=optimizer).peak_bytes
                # The copy is made under the profiler, so that its parameters are counted too.
                real = profiled_peak(partial(copy.deepcopy, model), shape, optimizer)
                row = {
                    "network": name,
                    "image": image,
                    "batch": batch,
                    "optimizer": optimizer,
                    "predicted_bytes": predicted,
                    "profiled_bytes": real,
                    "error": predicted / real - 1,
                }
                rows.add(row, worst_error=max((r["error"] for r in (*rows.rows, row)), key=abs))
                gc.collect()


# -- alternatives ------------------------------------------------------------------------------


def group_norm() -> nn.Module:
    from opacus.validators import ModuleValidator

    return ModuleValidator.fix(build("resnet50"))


def alternatives() -> None:
    """All of it in one run; the compiled networks are compiled for real, which takes minutes."""
    batch, image, rounds = 4, 224, 5
    makers: dict[str, Callable[[], nn.Module]] = {
        "BatchNorm": lambda: build("resnet50"),
        "MimicNorm": lambda: convert(build("resnet50"), MimicNorm(), example=(2, 3, image, image), init=None),
        "GroupNorm (opacus fixer)": group_norm,
        "normalizer-free (timm nf_resnet50)": lambda: build("timm:nf_resnet50"),
        "BatchNorm, checkpointed blocks": lambda: checkpointed(build("resnet50")),
        "BatchNorm, torch.compile": lambda: _compiled(makers["BatchNorm"]()),
        "MimicNorm, torch.compile": lambda: _compiled(makers["MimicNorm"]()),
    }
    networks = {name: make() for name, make in makers.items()}
    rows: dict[str, dict] = {}
    for name, network in networks.items():
        small, large = (memory.measure(network, (count, 3, image, image)) for count in (batch, 256))
        rows[name] = {
            "saved_mib_per_image": large.saved_bytes_per_sample / MIB,
            "predicted_peak_gib_at_batch_256": large.peak_bytes / 2**30,
            "predicted_peak_mib": small.peak_bytes / MIB,
        }
        print(name, rows[name], flush=True)
    images, labels = torch.rand(batch, 3, image, image), torch.zeros(batch, dtype=torch.long)
    steps = {name: training_step(network.train(), images, labels) for name, network in networks.items()}
    seconds = interleaved(steps, rounds=rounds, budget=float("inf"))  # its first rounds warm up and compile
    for name, make in makers.items():
        real = profiled_peak(make, (batch, 3, image, image), "sgd-momentum")
        rows[name] |= {
            "profiled_peak_mib": real / MIB,
            "seconds_per_step": seconds[name],
            "median_seconds_over_batchnorm": ratio(seconds[name], seconds["BatchNorm"])["value"],
        }
        print(name, rows[name], flush=True)
    settings = {"network": "resnet50", "batch": batch, "image": image, "rounds": rounds, "optimizer": "sgd-momentum"}
    save("memory-alternatives", provenance(**settings, threads=torch.get_num_threads()) | {"rows": rows})


def _compiled(model: nn.Module) -> nn.Module:
    model.compile()
    return model


# -- inductor ----------------------------------------------------------------------------------


def inductor() -> None:
    """Count what a real compiled forward saves, with hooks of its own."""
    models = zoo.torchvision().models
    ten_layers = partial(models.ResNet, models.resnet.BasicBlock, [1, 1, 1, 1])
    shape, rows = (4, 3, 64, 64), []
    for layout in (torch.contiguous_format, torch.channels_last):
        for method in (BatchNorm(), MimicNorm()):
            torch._dynamo.reset()
            model = convert(ten_layers(), method, example=shape, init=None).to(memory_format=layout)
            images = torch.rand(shape).contiguous(memory_format=layout)
            model.train().compile()
            rows.append(
                {
                    "method": method.name,
                    "layout": str(layout).removeprefix("torch."),
                    "predicted_saved_bytes": memory.measure(model, images).saved_bytes,
                    "really_saved_bytes": really_saved(model, images),
                }
            )
            print(rows[-1], flush=True)
    save("memory-inductor", provenance(network="ResNet of ten layers", shape=shape) | {"rows": rows})


PARTS = {part.__name__: part for part in (ratios, peak, prediction, alternatives, inductor)}

if __name__ == "__main__":
    torch.set_num_threads(1)  # on a shared machine two threads wait for each other more than they work
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    for part in parser.parse_args().parts or PARTS:
        PARTS[part]()
