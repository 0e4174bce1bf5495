"""Differentially private training: a converted network against Opacus' own fixer, which puts GroupNorm for BatchNorm.

    python benchmarks/opacus_dp.py [--threads 1]

Cost: one private step (forward, backward, clipping, noise, update) on random images, run in turns; ratios are taken
within a round. Bytes are those of every storage that lives during a real step.

Accuracy: the network of the examples on digits at a fixed epsilon. The learning rate of each method is the best of four
on 300 images held out of the training set, with a seed of its own; then three seeds on the test set. Writes
``results/opacus.json``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from opacus import PrivacyEngine
from opacus.grad_sample import GradSampleModule
from opacus.validators import ModuleValidator
from provenance import ROOT, provenance, save
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import mimicnorm as mn
from mimicnorm.compare.timing import interleaved, summary
from mimicnorm.memory.tracker import StorageTracker

sys.path.insert(0, str(ROOT / "examples"))
from digits import accuracy, digits
from small_resnet import small_resnet

GROUP, MIMIC, UNPREPARED = "GroupNorm (Opacus' fixer)", "MimicNorm", "MimicNorm, without prepare_"
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small ResNet, 8 px, batch 128": (lambda: small_resnet(in_channels=1), (128, 1, 8, 8)),
    "ResNet-18 a quarter wide, 32 px, batch 64": (
        lambda: mn.models.build("resnet18", num_classes=10, width=0.25),
        (64, 3, 32, 32),
    ),
}
EPSILON, DELTA, EPOCHS, BATCH = 8.0, 1e-4, 10, 128
RATES, SEEDS = (0.25, 0.5, 1.0, 2.0), (0, 1, 2)


def network(method: str, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> nn.Module:
    model = make()
    if method == GROUP:
        model = ModuleValidator.fix(model)
    else:
        mn.convert_(model, mn.MimicNorm(last_norm=False), example=(2, *shape[1:]))
    if method == MIMIC:
        mn.opacus.prepare_(model)
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    return model


@contextmanager
def unregistered() -> Iterator[None]:
    """Opacus as it is without ``prepare_``, whose samplers are registered for the whole process."""
    samplers = GradSampleModule.GRAD_SAMPLERS
    ours = {cls: f for cls, f in samplers.items() if f.__module__.startswith(mn.opacus.__name__)}
    for cls in ours:
        del samplers[cls]
    try:
        yield
    finally:
        samplers.update(ours)


class Step:
    """One private step on one batch."""

    def __init__(self, method: str, name: str):
        self.prepared = method != UNPREPARED
        make, shape = NETWORKS[name]
        torch.manual_seed(0)
        self.images, self.labels = torch.randn(shape), torch.randint(10, shape[:1])
        model = network(method, make, shape)
        with self.samplers():
            self.model, self.optimizer, _ = PrivacyEngine(accountant="rdp").make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), 0.1),
                data_loader=DataLoader(TensorDataset(self.images, self.labels), len(self.images)),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                poisson_sampling=False,
            )

    def samplers(self) -> AbstractContextManager[None]:
        return nullcontext() if self.prepared else unregistered()

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.update(self.forward())

    def forward(self) -> torch.Tensor:
        return cross_entropy(self.model(self.images), self.labels)

    def update(self, loss: torch.Tensor) -> None:
        with self.samplers():
            loss.backward()
        self.optimizer.step()

    def bytes(self) -> dict[str, int]:
        """What the forward pass leaves for the backward pass, and the peak of the step."""
        self()
        self.optimizer.zero_grad(set_to_none=True)
        tracker = StorageTracker("cpu")
        for p in self.model.parameters():
            tracker.add(p, "parameters")
        tracker.add(self.images, "inputs")
        with tracker:
            with tracker.during("forward"):
                loss = self.forward()
            saved = tracker.timeline[-1].total - tracker.timeline[-1].parameters - tracker.timeline[-1].inputs
            with tracker.during("backward"):
                self.update(loss)
        return {"saved_bytes": saved, "peak_bytes": max(moment.total for moment in tracker.timeline)}


def costs(rounds: int) -> list[dict]:
    rows = []
    for name in NETWORKS:
        steps = {method: Step(method, name) for method in (GROUP, MIMIC, UNPREPARED)}
        bytes_of = {method: step.bytes() for method, step in steps.items()}
        times = summary(interleaved(steps, rounds=rounds, budget=300), GROUP)
        for method in steps:
            rows.append({"network": name, "method": method, **bytes_of[method], **times[method]})
            print(rows[-1], flush=True)
    return rows


def trained(method: str, rate: float, seed: int, train: TensorDataset, test: TensorDataset) -> float:
    torch.manual_seed(seed)
    model = network(method, lambda: small_resnet(in_channels=1), (2, 1, 8, 8))
    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), rate),
        data_loader=DataLoader(train, BATCH),
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=EPOCHS,
        max_grad_norm=1.0,
    )
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(private(images), labels).backward()
            optimizer.step()
    assert engine.get_epsilon(DELTA) <= EPSILON
    return accuracy(model, test)


def accuracies() -> list[dict]:
    train, test = digits()
    part, held_out = (TensorDataset(*(t[s] for t in train.tensors)) for s in (slice(1200), slice(1200, None)))
    rows = []
    for method in (GROUP, MIMIC):
        tried = {rate: trained(method, rate, 100, part, held_out) for rate in RATES}
        rate = max(tried, key=lambda r: tried[r])
        values = [trained(method, rate, seed, train, test) for seed in SEEDS]
        row = {"method": method, "lr": rate, "held_out": tried, "accuracy": values, "mean": statistics.mean(values)}
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", category=UserWarning)
    fixed = {"epsilon": EPSILON, "delta": DELTA, "epochs": EPOCHS, "batch": BATCH, "rates": RATES, "seeds": SEEDS}
    about = provenance(threads=args.threads, rounds=args.rounds, **fixed)
    save("opacus", {**about, "costs": costs(args.rounds), "accuracy": accuracies()})


if __name__ == "__main__":
    main()
