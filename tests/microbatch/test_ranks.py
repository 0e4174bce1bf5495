"""Several processes on gloo: the gradient of the batch of all ranks, and failures that reach everyone."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_jobs
import torch
from torch import nn
from whole_and_parts import Classifier, batch, gradient, state

from mimicnorm.layers.last_norm import world_size
from mimicnorm.microbatch import ranks


def whole_batch(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make, loss, method = rank_jobs.CASES[name]
    net = rank_jobs.build(make, **method)
    loss_fn, denominator = rank_jobs.loss_and_denominator(loss, net)
    x, y = batch()
    divisor = 1 if denominator is None else denominator(y)
    value = loss_fn(net(x), y) / divisor
    value.backward()
    value = value.detach()
    return gradient(net, loss_fn), value, state(net, loss_fn)


@pytest.fixture(scope="module")
def found_by_two(tmp_path_factory) -> dict[str, list]:
    found = rank_jobs.run(rank_jobs.all_of_two, 2, tmp_path_factory.mktemp("two"))
    return {job: [f[job] for f in found] for job in found[0]}


@pytest.mark.parametrize("world", [2, 3])
def test_uneven_shares_in_micro_batches_give_the_gradient_of_the_global_batch(world, request, tmp_path):
    if world == 2:
        found = request.getfixturevalue("found_by_two")["exact_gradients"]
    else:
        found = rank_jobs.run(rank_jobs.exact_gradients, world, tmp_path)
    for name in rank_jobs.CASES:
        right, value, statistics = whole_batch(name)
        for rank in range(world):
            grad, loss, own_statistics, reductions = found[rank][name]
            assert float((grad - right).norm() / right.norm()) <= 1e-12, name
            torch.testing.assert_close(loss, value)
            torch.testing.assert_close(own_statistics, statistics)
            assert torch.equal(own_statistics, found[0][name][2]), f"{name}: statistics drift apart"
            assert len(reductions) == len(set(reductions)) > 0, f"{name}: gradients were reduced more than once"


def test_last_norm_in_plain_training_sees_all_ranks(found_by_two):
    found = found_by_two["plain_training"]
    right, _, statistics = whole_batch("classifier")
    reference = nn.BatchNorm1d(3, affine=False, momentum=None).double()
    reference(torch.arange(6, dtype=torch.float64).reshape(2, 3) + 1)  # all of it on rank 1
    reference(torch.arange(3, dtype=torch.float64) + torch.tensor([[0.0], [1.0]]))  # a sample on each
    for rank in range(2):
        torch.testing.assert_close(found[rank]["lone"], state(reference))
        for name in ("eager", "compiled"):
            grad, own_statistics = found[rank][name]
            assert float((grad - right).norm() / right.norm()) <= 1e-12
            torch.testing.assert_close(own_statistics, statistics)
        assert found[rank]["conversion"]


def test_a_failure_on_one_rank_is_raised_on_all(found_by_two):
    healthy, broken = found_by_two["failures"]
    assert "NaN logits in micro-batch 2 (samples 4 to 5)" in broken["nan"]
    assert "fc" in broken["nan"]
    assert "1 of 2 ranks failed" in healthy["nan"]
    assert "number of samples" in broken["empty"]
    assert "1 of 2 ranks failed" in healthy["empty"]
    for name in ("loss", "loss, one pass"):
        assert broken[name] == "boom"
        assert "1 of 2 ranks failed" in healthy[name]
    assert "Class weights" in broken["weights"]
    for loss in ("contrastive", "weights of ranks", "ignored targets"):
        for name in (loss, f"{loss}, one pass"):
            assert "loss_fn is not a mean over samples" in broken[name]
            assert "several ranks" in broken[name]
            assert "denominator=" in broken[name]
    assert healthy["contrastive"]
    assert "it draws random numbers. If it is, say so with loss_in_pieces=True" in broken["noise"]
    assert "the loss is nan" in broken["nan, loss"]
    assert "1 of 2 ranks failed" in healthy["nan, loss"]
    for rank in (healthy, broken):
        assert torch.equal(*rank["statistics"])
    assert "single value per class" in healthy["lone"]
    assert "single value per class" in broken["lone"]
    assert all(healthy["gradients"])
    assert all(broken["gradients"])


def test_a_rank_that_runs_out_of_memory_makes_all_fail_at_once(found_by_two):
    healthy, broken = found_by_two["out_of_memory"]
    for name in ("forward", "backward", "backward, one pass", "whole batch"):
        assert broken[name] == "out of memory"
        assert "1 of 2 ranks failed" in healthy[name]
        right = whole_batch("no last norm" if "one pass" in name else "classifier")[0]
        for rank in (healthy, broken):
            assert rank[f"{name}: statistics"]
            assert float((rank[f"{name}: next"] - right).norm() / right.norm()) <= 1e-12, name
    assert "the ranks call different heads" in healthy["heads"]
    assert "the ranks call different heads" in broken["heads"]


def test_a_rank_that_dies_makes_the_others_fail(tmp_path: Path):
    context = rank_jobs.CONTEXT
    failed = context.Event()
    processes = [context.Process(target=rank_jobs.deserted, args=(r, 2, str(tmp_path), failed)) for r in range(2)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(timeout=120)  # no hang: gloo's own limit is set to 60 seconds
    alive = [p.is_alive() for p in processes]
    for p in processes:
        p.kill()
    assert not any(alive)
    assert processes[1].exitcode == 7
    assert failed.is_set()


def test_one_process_needs_no_communication():
    assert world_size() == 1
    net = Classifier()
    assert ranks.bare(net) is net
    with ranks.all_or_none(None, amounts=1) as amounts:
        amounts[0] = 3.0
    assert amounts == [3.0]
    with pytest.raises(KeyError), ranks.all_or_none(None):
        raise KeyError("raised here")
    ranks.synchronise_gradients(net)
