from __future__ import annotations

import io

import pytest
from rich.console import Console
from sample import comparison

from mimicnorm.report import columns, rows, table
from mimicnorm.report.summary import title


def test_cells_say_what_the_numbers_say():
    batchnorm, mimicnorm, nonorm, fixup = rows(comparison())
    assert batchnorm[:2] == ["batchnorm", "92.00 ± 1.41\nloss 0.250\nconf. 93.5%\nECE 1.6%"]
    assert batchnorm[2:] == ["-", "42.00 KiB\nx1.00", "6.00 MiB\nx1.00", "12.3 ms", "1.6"]
    assert mimicnorm[1:3] == ["94.50 ± 0.71\nconf. 60.0%\nECE 34.5%", "+2.50\n[-2.1, +7.1]"]
    assert mimicnorm[5:] == ["2.50 s\nx0.91\n[0.84, 0.97]", "at least 102"]
    assert nonorm[1:] == ["2 of 2 diverged (step 17, 17)", *"----", "unstable from 0.1 down to 0.0001"]
    assert fixup[1:] == list("------")


def test_one_seed_no_calibration_and_columns_without_content():
    data = comparison()
    data["methods"][1]["accuracy"]["difference"] = None
    for m in data["methods"]:
        m.pop("calibration", None)  # a comparison from before it was measured
        m["time"] = m["largest_lr"] = None
    assert [row[:3] for row in rows(data)[:2]] == [
        ["batchnorm", "92.00 ± 1.41", "-"],
        ["mimicnorm\n+residual=<linear>", "94.50 ± 0.71", "+2.50\n(one seed)"],
    ]
    assert [column.heading.split("\n")[0] for column in columns(data)[3:]] == ["saved", "predicted"]


def test_times_of_less_than_six_rounds_have_a_range():
    data = comparison()
    headings = [column.heading for column in columns(data)]
    explanation = columns(data)[headings.index("time\nper step")].explanation
    assert "with the 95 % interval of" in explanation
    for m in data["methods"][:2]:
        m["time"] |= {"rounds": 1, "ratio": {"value": 0.9, "low": 0.9, "high": 0.9}}
    assert "with the range of" in columns(data)[headings.index("time\nper step")].explanation
    assert [row[5] for row in rows(data)[:2]] == ["12.3 ms", "2.50 s\nx0.90\n[0.90, 0.90]"]


def test_accuracies_on_images_held_out_are_not_called_test_accuracies():
    data = comparison()
    data["settings"] |= {"validation": 0.1, "classes": "0-4"}
    assert title(data).startswith("resnet18 (width 0.25) on digits (classes 0-4): ")
    assert columns(data)[1].heading == "validation\naccuracy, %"
    assert not any("test images" in column.explanation for column in columns(data))


@pytest.mark.parametrize("label", ["mimicnorm", "mimicnorm+residual=linear"])
def test_the_usual_table_fits_a_terminal_of_80_columns(label):
    data = comparison()
    data["methods"] = data["methods"][:2]
    data["methods"][1]["label"] = label
    for m in data["methods"]:
        m["largest_lr"] = None
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(data))
    text = console.export_text()
    assert "resnet18 (width 0.25) on digits: 2 methods, 1,438 images, 3 epochs" in text
    assert "…" not in text
