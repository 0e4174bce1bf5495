"""What stands in for a LastNorm while micro-batches run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mimicnorm.layers import LastNorm
from mimicnorm.microbatch.batches import MicroBatch
from mimicnorm.microbatch.heads import Call, Capture, Replay, WholeBatch, standing_in


def test_capture_knows_an_output_only_while_nobody_writes_into_it():
    net = nn.Sequential(nn.Linear(3, 2), LastNorm(2))
    capture = Capture()
    with torch.no_grad(), standing_in({"1": net[1]}, capture):
        first, second = net(torch.randn(4, 3)), net(torch.randn(4, 3))
    assert capture.source(first) == ("1", 0)
    assert capture.source(second) == ("1", 1)
    assert capture.source(first.clone()) is None
    kept = first.clone()
    first.mul_(2)
    assert capture.source(first) is None
    assert torch.equal(capture.logits[Call("1", 0)], kept)


def test_stand_ins_are_gone_after_an_error():
    norm = LastNorm(2)
    with pytest.raises(KeyError, match="gone"), standing_in({"fc": norm}, Capture()):
        raise KeyError("gone" if norm.intercept is not None else "never there")
    assert norm.intercept is None


@pytest.mark.parametrize(("dim", "shapes"), [(1, [(2, 3, 4, 5), (1, 3, 6, 2)]), (-1, [(2, 7, 3), (3, 1, 3)])])
def test_whole_batch_normalises_every_layout_as_one(dim, shapes):
    norm = LastNorm(3, dim=dim)
    parts = [torch.randn(s) + 2 for s in shapes]
    whole = WholeBatch(norm, parts)
    assert norm.num_batches_tracked == 0
    whole.normalise()
    pieces = whole.normed_parts
    assert [tuple(p.shape) for p in pieces] == shapes
    rows = torch.cat([p.detach().movedim(dim, -1).reshape(-1, 3) for p in pieces])
    torch.testing.assert_close(rows.mean(0), torch.zeros(3))
    assert all(torch.equal(a, b) for a, b in zip(whole.raw_parts, parts, strict=True))
    assert norm.num_batches_tracked == 1


def test_replay_gives_the_known_value_and_the_known_gradient():
    z = torch.randn(2, 3, requires_grad=True)
    piece, key = MicroBatch(0, 0, 2, (), {}, None), Call("fc", 0)
    whole = WholeBatch(LastNorm(3), [z.detach() * 2])
    whole.normalise()
    whole.normed_parts[0].grad = torch.randn(2, 3)
    whole.backward()
    replay = Replay(piece, {key: whole})
    out = replay(key, z)
    assert torch.equal(out, whole.normed_parts[0])
    (5 * out).sum().backward()
    assert torch.equal(z.grad, whole.grads[0])
    assert replay.deviations["fc: the logits"][0].item() == pytest.approx(0.5)
