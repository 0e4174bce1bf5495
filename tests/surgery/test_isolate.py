"""A model that runs through ``isolate.run`` is as before, whatever its forward pass changes."""

from __future__ import annotations

import copy
import random
import warnings
from collections import deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mimicnorm.surgery import isolate


class Restless(nn.Module):
    """Changes everything it can, at every depth."""

    def __init__(self):
        super().__init__()
        self.linear, self.bn = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.average = nn.Parameter(torch.ones(4), requires_grad=False)
        self.rnn, self.calls, self.cache = nn.GRU(4, 4), 0, torch.zeros(2)
        self.log = {"rows": [torch.zeros(2)], "deep": {"er": [deque([1], 3), {2}, (torch.zeros(2), [3])]}}
        self.array, self.order = np.zeros(3), [self]
        self.generators = [torch.Generator("cpu"), random.Random(0), np.random.default_rng(0), np.random.RandomState(0)]
        self.unregistered = [nn.BatchNorm1d(4)]

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        self.calls += 1
        self.average.data.mul_(0.5)
        self.cache.data.add_(1)
        self.log["rows"][0] += 1
        self.log["rows"].append(x)
        steps, numbers, (tensor, inner) = self.log["deep"]["er"]
        steps.append(2)
        numbers.add(3)
        tensor.add_(1)
        inner.clear()
        self.array += 1
        self.new = x
        self.register_forward_hook(lambda *_: None)
        self.register_buffer("late", x)
        torch_generator, *others = self.generators
        others[0].random(), others[1].random(), others[2].random()
        random.random(), np.random.random()
        y = self.unregistered[0](self.bn(self.linear(x)))
        y = y + torch.rand(4, generator=torch_generator).to(y) + torch.rand(4).to(y)
        return self.rnn(F.dropout(y, 0.5))[0]


def description(model: Restless) -> list:
    """All of the state, in a form that can be compared."""
    torch_generator, *others = model.generators
    return [
        {k: v.tolist() for k, v in model.state_dict().items()},
        [id(p) for p in model.parameters()],
        [m.training for m in model.modules()],
        sorted(model.__dict__),
        repr([model.calls, model.cache, model.log, model.array, len(model._forward_hooks)]),
        [id(t) for t in (model.cache, model.log["rows"][0], *model.rnn._flat_weights)],
        torch_generator.get_state().tolist(),
        *(others[0].getstate(), repr(others[1].bit_generator.state), repr(others[2].get_state())),
        *(random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()),
        {k: v.tolist() for k, v in model.unregistered[0].state_dict().items()},
    ]


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_left_of_a_pass(fake: bool, fails: bool):
    model, x = Restless(), torch.ones(5, 3)
    model.bn.eval()
    before, versions = description(model), [p._version for p in model.parameters()]

    def call(x: Tensor) -> torch.Size:
        shape = model(x).shape
        if fails:
            raise KeyError("on the way")
        return shape

    def run() -> torch.Size:
        return isolate.run(model, call, (x,), fake=fake, training=True, seed=3, modes=(torch.no_grad(),))

    if fails:
        with pytest.raises(KeyError):
            run()
    else:
        assert run() == (5, 4)
    assert description(model) == before
    assert [p._version for p in model.parameters()] == versions
    assert torch.equal(x, torch.ones(5, 3))


def test_a_seed_decides_and_none_goes_on_with_the_state():
    model = nn.Dropout()
    draws = [isolate.run(model, model, (torch.ones(64),), training=True, seed=s) for s in (1, 1, 2, None)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(draws[3], F.dropout(torch.ones(64)))


def test_each_module_keeps_its_mode_if_none_is_asked_for():
    model = nn.Sequential(nn.Dropout(), nn.Dropout()).train()
    model[0].eval()
    assert isolate.run(model, lambda: [m.training for m in model]) == [False, True]


@pytest.mark.parametrize("fake", [True, False])
def test_tensors_made_in_inference_mode_are_copied(fake: bool):
    model = nn.Linear(3, 3)
    with torch.inference_mode():
        model.kept, x = torch.ones(3), torch.ones(2, 3)
    versions = isolate.run(model, lambda x: (model(x).mul_(model.kept)._version, model.kept._version), (x,), fake=fake)
    assert versions == (1, 0)
    assert model.kept.is_inference()
    with torch.inference_mode():
        assert isolate.run(model, lambda: not torch.is_inference_mode_enabled() and torch.is_grad_enabled())


def test_gradients_go_to_copies():
    model = nn.Linear(3, 1)
    grads = isolate.run(model, lambda: torch.autograd.grad(model(torch.ones(3)), list(model.parameters())))
    assert torch.equal(grads[0], torch.ones(1, 3))
    assert model.weight.grad is None


def test_scripted_children_and_lists_of_weights_run_on_copies():
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(3)), nn.LSTM(3, 3))
    state = copy.deepcopy(model.state_dict())
    output, _ = isolate.run(model, model, (torch.ones(2, 3),), training=True, modes=(torch.no_grad(),))
    assert output.shape == (2, 3)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_warnings_are_silenced_and_other_processes_left_alone():
    norm = nn.SyncBatchNorm(3)  # refuses the CPU

    def call(x: Tensor) -> Tensor:
        warnings.warn("noise", stacklevel=1)
        return norm(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isolate.run(norm, call, (torch.ones(2, 3),), training=True).shape == (2, 3)


def test_a_container_that_did_not_change_is_not_written():
    class Guarded(dict):
        def clear(self):
            raise AssertionError("was written")

    model = nn.Linear(2, 2)
    model.settings = Guarded(tensor=torch.ones(1))
    isolate.run(model, lambda: model.settings["tensor"].add_(1))
    assert model.settings["tensor"] == 1
