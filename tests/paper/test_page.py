from made_runs import run

from mimicnorm.paper import page
from mimicnorm.paper.published import TABLE2
from mimicnorm.paper.tables import accuracies, by_rate, curves
from mimicnorm.training.state import write_json

DATA = {
    "title": "t",
    "scale": "desk",
    "verdicts": [],
    "runs": {},
    "missing": [],
    "seconds": 60.0,
    "sizes": ["3 epochs"],
    "figure": None,
}


def lines(item, rows, **fields):
    return page.section({**DATA, "item": item, "rows": rows, **fields}).lines


def test_both_numbers_and_what_diverged():
    rows = accuracies({"a": run("vgg16", "nonorm", [0.31]), "b": run("vgg16", "nonorm", [], "diverged")})
    assert lines("table1", rows)[0][:4] == ("vgg16", "no norm", "68.97 ± 0.36 (unstable)", "31.00, 1 of 2 diverged")
    made = page.section({**DATA, "item": "table1", "rows": rows, "runs": {"a": "k"}, "missing": ["b"], "seconds": 7200})
    assert made.state == "desk scale, 1 of 2 runs, 2.0 hours of training; 3 epochs"
    assert page.section({**DATA, "item": "table2", "rows": [], "costs": {"vgg16 lr 0.1": 90.0}}).costs == {
        "vgg16 lr 0.1": "1.5"
    }


def test_memory_is_relative_to_batch_norm():
    peaks = {"batchnorm": 100.0, "mimicnorm": 51.0}
    rows = [{"network": "vgg11", "method": m, "top1": [], "diverged": 0, "peak_mib": p} for m, p in peaks.items()]
    assert [line[4:] for line in lines("table1", rows)] == [
        ("2,971", "1.00", "100", "1.00"),
        ("2,851", "0.96", "51", "0.51"),
    ]


def test_curves_and_rates():
    both = {"a": run("resnet18", "fixup", [0.1, 0.2, 0.3]), "b": run("resnet18", "nonorm", [0.05], "diverged")}
    shown = lines("figure-resnet-ablation", curves(both))
    assert shown == [
        ("resnet18", "Fixup", "10.0", "20.0", "30.0", 0),
        ("resnet18", "no norm", "5.0", "1.0", "1.0", 1),
    ]
    (rates,) = lines("table2", by_rate({"a": run("vgg16", "mimicnorm", [0.4])}))
    assert rates[1] == f"{TABLE2[0.1]['nonorm']:.1f} / -"
    assert "46.9 / 40.0" in rates


def test_both_pages_show_the_verdicts_and_html_escapes_them(tmp_path):
    verdict = {"claim": "<b>a claim</b>", "verdict": "does not hold here", "evidence": "not at 0.1: 3"}
    data = {**DATA, "item": "table2", "rows": by_rate({"a": run("vgg16", "mimicnorm", [0.4])}), "verdicts": [verdict]}
    (tmp_path / "paper").mkdir()
    write_json(tmp_path / "paper" / "table2-desk.json", data)
    assert "## table2: t" in page.markdown(tmp_path)
    assert "| <b>a claim</b> | **does not hold here** | not at 0.1: 3 |" in page.markdown(tmp_path)
    assert "&lt;b&gt;a claim&lt;/b&gt;" in page.html(tmp_path)
    assert '<td class="does">does not hold here</td>' in page.html(tmp_path)
