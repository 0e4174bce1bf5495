import json

import pytest
from torch import nn

from mimicnorm.errors import MemoryPredictionError
from mimicnorm.memory import Analysis, Moment, measure
from mimicnorm.memory.analysis import as_text


def nested():
    block = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh())
    return nn.Sequential(nn.Linear(16, 16), block, nn.Linear(16, 5))


def test_modules_sum_to_the_whole_at_every_depth():
    analysis = measure(nested(), (32, 16))
    assert list(analysis.by_module()) == sorted(analysis.by_module(), key=lambda n: -analysis.by_module()[n])
    for depth in (None, 1, 2, 3):
        assert sum(analysis.by_module(depth).values()) == analysis.saved_bytes
    assert analysis.by_module(1)["1"] == sum(v for k, v in analysis.by_module().items() if k.startswith("1."))
    assert analysis.by_module(0) == {"(model)": analysis.saved_bytes}
    for attempt, wrong in ((analysis.by_module, -1), (analysis.by_module, "1"), (analysis.module_table, 1.5)):
        with pytest.raises(MemoryPredictionError, match=r"depth=.*: use a whole number of at least 0"):
            attempt(wrong)
    with pytest.raises(MemoryPredictionError, match="rows=-1: use a whole number of at least 0"):
        analysis.module_table(rows=-1)


def test_what_the_model_itself_saves_is_named():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    assert measure(Own(4, 4), (8, 4)).by_module()["(model)"] == 8 * 4 * 4


def test_the_peak_is_the_largest_moment():
    moments = tuple(
        Moment("forward", parameters=10, inputs=1, optimizer_state=0, gradients=0, activations=a, temporary=t)
        for a, t in [(0, 5), (7, 5), (9, 1)]
    )
    analysis = Analysis(1, 9, 10, 0, 1, 0, 0, moments, {"": 9})
    assert analysis.peak is moments[1]
    assert analysis.peak_bytes == 10 + 1 + 7 + 5


def test_the_parts_of_the_timeline_end_where_they_should():
    analysis = measure(nested(), (32, 16))
    last = analysis.timeline[-1]
    assert (last.phase, last.gradients, last.optimizer_state) == (
        "optimizer", analysis.gradients, analysis.optimizer_state
    )  # fmt: skip
    at_end_of_forward = [moment for moment in analysis.timeline if moment.phase == "forward"][-1]
    assert at_end_of_forward.activations == analysis.saved_bytes
    assert at_end_of_forward.gradients == 0
    output = 32 * 5 * 4
    assert last.activations + last.temporary == output + 4  # the loop still holds the output and the loss


def test_tables_show_the_numbers():
    analysis = measure(nested(), (4096, 16))
    text = str(analysis)
    assert "batch 4096" in text
    assert f"{analysis.peak_bytes / 2**20:.2f} MiB" in text
    modules = as_text(analysis.module_table(rows=2))
    assert "1.1" in modules
    assert f"({len(analysis.by_module()) - 2} more)" in modules
    assert modules.count("%") == 3


def test_the_dictionary_is_json():
    analysis = measure(nested(), (32, 16), optimizer="adamw")
    loaded = json.loads(json.dumps(analysis.as_dict()))
    assert loaded["peak_bytes"] == analysis.peak_bytes
    assert sum(loaded["peak"][key] for key in loaded["peak"] if key != "phase") == analysis.peak_bytes
    assert loaded["by_module"] == analysis.by_module()
