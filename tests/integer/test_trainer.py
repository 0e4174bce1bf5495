from __future__ import annotations

import pytest
import torch
from converted_networks import NETWORKS, batch, dry, fires, gradients, network
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import mimicnorm as mn
from mimicnorm import models
from mimicnorm.errors import IntegerError, NonFiniteError
from mimicnorm.integer import Trainer


def trained(name: str, steps: int = 2, micro_batch: int | None = None, **options) -> Trainer:
    trainer = Trainer(network(name), **{"lr": 0.1, "weight_decay": 5e-4, **options})
    for step in range(steps):
        trainer.step(*batch(seed=step), micro_batch=micro_batch)
    return trainer


def same(a: Trainer, b: Trainer) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


class Walk(TorchDispatchMode):
    """Collects every operation that reads or makes a tensor that is not of integers."""

    def __init__(self):
        super().__init__()
        self.operations, self.floating = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        tensors = [t for t in pytree.tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        if any(t.is_floating_point() or t.is_complex() for t in tensors):
            self.floating.add(str(func))
        return result


@pytest.mark.parametrize("name", NETWORKS)
def test_no_operation_of_a_step_sees_a_floating_point_tensor(name):
    trainer = Trainer(network(name), lr=0.1, weight_decay=5e-4)
    images, labels = batch()
    codes = trainer.encode(images)
    with Walk() as walk:
        trainer.step(codes, labels)  # with calibration
        trainer.step(codes, labels, micro_batch=8)
        trainer.logits(codes)
    assert walk.operations > 1000
    assert walk.floating == set()
    with Walk() as walk:
        trainer.step(images, labels)
    assert walk.floating  # the walk does see floating point where there is some


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_the_same_for_any_threads_and_micro_batches(name):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = trained(name)
        assert same(whole, trained(name, micro_batch=1))
        torch.set_num_threads(2)
        assert same(whole, trained(name))
        assert same(whole, trained(name, micro_batch=8))
    finally:
        torch.set_num_threads(threads)
    assert not same(whole, trained(name, seed=1))


@pytest.mark.parametrize("name", ["resnet10", "vgg11"])
def test_a_state_continues_bit_for_bit(name):
    first, second = trained(name, steps=2), Trainer(network(name), lr=0.1, weight_decay=5e-4)
    state = first.state_dict()
    assert all(not value.is_floating_point() for value in state.values())
    first.step(*batch(seed=2))  # which leaves the state as it was
    second.load_state_dict(state)
    second.step(*batch(seed=2))
    assert same(first, second)


def test_a_state_of_another_network_or_of_other_settings_is_refused():
    with pytest.raises(IntegerError, match=r"another network: .* is (missing|.* not there here)"):
        Trainer(network("mlp10"), lr=0.1).load_state_dict(trained("resnet10", 1).state_dict())
    state = trained("mlp10", 1).state_dict()
    model = models.build("mlp10", input="cifar", width=0.25, image=8, num_classes=10)
    mn.convert_(model, mn.MimicNorm(min_fan_in=12), example=(2, 3, 8, 8))
    with pytest.raises(IntegerError, match=r"another network: .* is \(\("):
        Trainer(model, lr=0.1).load_state_dict(state)
    for changed, name in (
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"master_bits": 8}, "master_bits"),
        ({"momentum": 0.5}, "momentum in eighths was 7 and is 4"),
        ({"rounding": "nearest"}, "stochastic rounding"),
    ):
        trainer = Trainer(network("mlp10"), lr=0.1, **changed)
        with pytest.raises(IntegerError, match=f"other settings: {name}"):
            trainer.load_state_dict(state)
        assert trainer.steps == 0


class Zeros(nn.Module):
    """A residual sum below a classifier of zeros: no error reaches it in the first step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.conv = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)
        nn.init.zeros_(self.fc.weight)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.fc(self.pool(torch.relu(self.conv(x) + x)).flatten(1))


def test_layers_below_a_classifier_of_zeros_learn():
    def run(micro_batch=None):
        trainer = Trainer(Zeros(), lr=1e-3)
        start = trainer.network.parameters[0].velocity.clone()
        moved = []
        for step in range(3):
            trainer.step(*batch(40, seed=step), micro_batch=micro_batch)
            moved.append(not torch.equal(start, trainer.network.parameters[0].velocity))
        return trainer, moved

    whole, moved = run()
    assert moved == [False, True, True]
    assert same(whole, run(micro_batch=7)[0])


def test_logits_of_a_sample_do_not_depend_on_the_batch():
    for name in ("resnet10", "squeezenet", "mlp10"):
        trainer = trained(name, 2)
        images, _ = batch(12, seed=5)
        images[7] *= 8
        assert torch.equal(trainer.logits(images)[:1], trainer.logits(images[:1]))


def test_logits_need_exponents_from_training_images():
    trainer = Trainer(network("mlp10"), lr=0.1)
    with pytest.raises(IntegerError, match="before the first step"):
        trainer.logits(IMAGES)
    assert trainer.input_exponent is None


def spoilt(value: float) -> tuple[Tensor, Tensor]:
    images, labels = batch()
    images[3, 0, 2, 2] = value
    return images, labels


IMAGES, LABELS = batch()


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (*spoilt(float("nan")), "not finite"),
        (*spoilt(float("inf")), "not finite"),
        (IMAGES, LABELS[:-1], "use one int64 for each of 20"),
        (IMAGES, LABELS.float(), "use one int64 for each of 20"),
        (IMAGES, LABELS[:, None], "use one int64 for each of 20"),
        (IMAGES[:1], LABELS[:1], "two samples"),
        (torch.zeros(20, 8, 8, 3, dtype=torch.int8), LABELS, "codes without an exponent"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused(images, labels, message):
    trainer = Trainer(network("mlp10"), lr=0.1)
    with pytest.raises(IntegerError, match=message):
        trainer.step(images, labels)
    assert trainer.input_exponent is None


def test_divergence_is_an_error():
    with pytest.raises(NonFiniteError, match="diverged"):
        trained("resnet10", 20, lr=1e4)


def test_saturation_is_counted_by_layer():
    trainer = trained("resnet10", 3)
    usual = trainer.saturation()
    assert {"input", "relu"} <= usual.keys()
    assert all(0 <= fraction < 0.2 for pair in usual.values() for fraction in pair)
    images, labels = batch(seed=9)
    trainer.step(images * 16, labels)
    assert trainer.saturation()["input"][0] > 0.5
    whole = trained("resnet10", 3, micro_batch=7).saturation()
    assert whole == usual


@pytest.mark.parametrize("name", NETWORKS)
def test_row_means_stay_within_half_a_unit(name):
    weights = [p for p in trained(name, steps=4).network.parameters if p.centred]
    assert len(weights) >= 5
    for p in weights:
        rows = p.master.long().flatten(1)
        assert (2 * rows.sum(1).abs() <= rows.shape[1]).all()


@pytest.mark.parametrize(("name", "least"), [("fires", 0.9), ("resnet10", 0.8), ("vgg11", 0.6), ("mlp10", 0.6)])
def test_gradients_point_where_those_of_floating_point_do(name, least):
    model = fires() if name == "fires" else dry(network(name))
    images, labels = batch(64)
    trainer = Trainer(model, lr=0.0)
    for _ in range(3):  # exponents settle
        loss, _ = trainer.step(images, labels)
    right = F.cross_entropy(model.train()(images), labels)
    right.backward()
    assert loss == pytest.approx(right.item(), abs=0.1)
    wanted, found = {n: p.grad.double() for n, p in model.named_parameters()}, gradients(trainer, 64)
    assert found.keys() == wanted.keys()
    for p in trainer.network.parameters:
        value, want = found[p.name], wanted[p.name]
        if p.centred:
            value = value - value.flatten(1).mean(1).view(-1, *[1] * (value.dim() - 1))
        if want.dim() > 1:
            assert F.cosine_similarity(value.flatten(), want.flatten(), dim=0) > least, p.name
            assert 0.7 < value.norm() / want.norm() < 1.3, p.name
    if name == "resnet10":  # whose scalars of branches and logits are trained, too
        scalars = [n for n, want in wanted.items() if want.numel() == 1]
        largest = max(abs(wanted[n]) for n in scalars)
        assert len(scalars) > 4
        assert all(abs(found[n] - wanted[n]) < 0.3 * largest for n in scalars)


@pytest.mark.parametrize("name", ["resnet10", "vgg11", "mlp10"])
def test_what_is_written_back_gives_the_same_logits(name):
    trainer = Trainer(network(name), lr=0.01)
    images, labels = batch()
    for _ in range(3):
        trainer.step(images, labels)
    logits = trainer.logits(images).double() * 2.0**-16
    with torch.no_grad():
        right = trainer.write_back().eval()(images).double()
    assert F.cosine_similarity(logits.flatten(), right.flatten(), dim=0) > 0.95


def test_it_learns_and_evaluates():
    images, labels = batch(40)
    images = images * 0.5
    images[torch.arange(40), labels % 3, labels // 3, labels // 2] += 3
    trainer = Trainer(network("resnet10"), lr=0.1)
    first = trainer.step(images, labels)[0]
    for _ in range(15):
        last, correct = trainer.step(images, labels)
    assert last < first / 2
    assert correct > 30
    assert trainer.evaluate(images, labels, batch=16) > 0.7


def test_networks_without_last_norm_or_norm_at_all_train():
    for method in (mn.WeightMean(min_fan_in=12), mn.NoNorm()):
        trainer = Trainer(network("squeezenet", method), lr=0.01)
        assert trainer.step(*batch())[0] == pytest.approx(2.3, abs=1.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": 0.1, "momentum": 0.95}, "momentum=0.95: integers have eighths, from 0 to 0.875"),
        ({"lr": 0.1, "rounding": "up"}, "stochastic"),
        ({"lr": 0.1, "master_bits": 17}, "use 8 to 16"),
    ],
)
def test_arguments_that_make_no_sense(options, message):
    with pytest.raises(IntegerError, match=message):
        Trainer(network("mlp10"), **options)
