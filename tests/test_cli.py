"""The command line: what it prints, its errors, that it starts without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import zoo

from mimicnorm.cli import main
from mimicnorm.cli.verbs import VERBS


def python(code: str, **how) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **how)


def test_convert_prints_the_plan_and_the_saving_of_a_factory_of_the_users_own(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Conv1d(2, 8, 30), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 3, 1))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "mine:net", "--shape", "4", "2", "64"]) == 0
    out = capsys.readouterr().out
    assert "1 BatchNorm (1 removed" in out
    assert "saved for backward per sample of 2 x 64" in out


def test_convert_as_json(capsys):
    zoo.timm()
    assert main(["convert", "timm:resnet18", "--image", "64", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["totals"]["centred"] == 20
    assert 0.4 < data["saved_bytes"]["ratio"] < 0.6


def test_memory_table_and_json(capsys, tmp_path):
    plot = tmp_path / "memory.png"
    words = ["memory", "resnet10", "--input", "cifar", "--batch", "4"]
    assert main([*words, "--budget", "1GiB", "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "mimicnorm" in out
    assert "nonorm" in out
    assert plot.stat().st_size > 1000
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["methods"]
    assert rows["mimicnorm"]["saved_bytes"] < 0.6 * rows["batchnorm"]["saved_bytes"]


def test_theory_commands(capsys, tmp_path):
    assert main(["theory", "gains"]) == 0
    assert "1.7129" in capsys.readouterr().out
    assert main(["theory", "doctor", "resnet10", "--input", "cifar", "--batch", "2"]) == 0
    assert "layer4.0.conv2" in capsys.readouterr().out
    assert main(["theory", "figure", "transitions", "--out", str(tmp_path / "t.png")]) == 0
    assert (tmp_path / "t.png").exists()


DIGITS = ("train", "digits-resnet10")
EARLY = [  # mistakes in names and numbers, found before torch is loaded
    (("compaer",), "there is no verb 'compaer'; mimicnorm --help explains them. Did you mean compare"),
    ((), "give a verb"),
    (("--verbose", "convert"), "there is no verb '--verbose'"),
    (("convert", "resnet81"), "'resnet81' is not a model"),
    (("convert", "resnet18", "--method", "mimik"), "Did you mean mimicnorm"),
    (("memory", "resnet18", "--methods", "batchnorm, mimik"), "Did you mean mimicnorm"),
    (("theory", "doctor", "resnet81"), "'resnet81' is not a model"),
    (("compare", "--methods", "mimik+residual=linear:2"), "Did you mean mimicnorm"),
    (("compare", "--data", "cifar1000"), "Did you mean cifar100"),
    (("compare", "--seeds", "0"), "--seeds=0: use a whole number of at least 1"),
    (("compare", "--milestones", "3"), "use fractions of the run"),
    (("train", "digits-resnet1O"), "Did you mean digits-resnet10"),
    (("train",), "name a recipe"),
    ((*DIGITS, "--method", "mimik"), "Did you mean mimicnorm"),
    ((*DIGITS, "--settings", "gain=2"), "'gain=2' is not a NAME=VALUE that mimicnorm has"),
    ((*DIGITS, "--model", "resnet81"), "'resnet81' is not a model"),
    ((*DIGITS, "--data", "digit"), "Did you mean digits"),
    ((*DIGITS, "--out", ""), "--out is empty"),
    ((*DIGITS, "--integer", "--precision", "bf16"), "--integer and --precision bf16: give one of them"),
]


def test_help_and_early_mistakes_are_one_line_leave_nothing_and_do_not_wait_for_torch(tmp_path):
    done = python(
        "import sys\nfrom mimicnorm.cli import main\nfrom mimicnorm.cli.verbs import VERBS\n"
        "def run(*words):\n"
        "    try: return main(words)\n"
        "    except SystemExit as exit: return exit.code\n"
        "assert run('--help') == 0 and 'tyro' not in sys.modules\n"
        f"assert all(run(*words) == 2 for words in {[words for words, _ in EARLY]!r})\n"
        "assert all(run(verb, '--help') == 0 for verb in VERBS)\n"
        "assert 'torch' not in sys.modules",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for line, (words, says) in zip(done.stderr.splitlines(), EARLY, strict=True):
        assert line.startswith("mimicnorm: "), words
        assert says in line
    assert all(f"usage: mimicnorm {verb}" in done.stdout for verb in VERBS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["convert", "resnet10", "--image", "32", "--batch", "1"], "use --batch 2 or more"),
        (["memory", "mlp10", "--shape"], "the shape is empty"),
        (["memory", "resnet10", "--methods", ","], "--methods names no method"),
        (["theory", "figure", "nothing"], "choose one of"),
        (["theory", "figure", "phase", "--out", "/no/such/place/a.png"], "there is no directory"),
        (["theory", "figure", "phase", "--seed", "-1"], "--seed must be at least 0"),
        (["theory", "check", "--seed", "9" * 20], "--seed must be at least 0 and below 2^63"),
        (["theory", "doctor", "resnet10", "--plot", "a.xyz"], "is not an image format"),
        ([*DIGITS, "--out", "run", "--batch", "5000"], "it must be at most 1438, the number of training images"),
        ([*DIGITS, "--out", "run", "--device", "cuda:99"], "device 'cuda:99' cannot be used"),
        (["compare", "--out", "run", "--batch", "5000"], "batch=5000 is more than the 1438 training images: give less"),
    ],
)
def test_later_mistakes_are_one_line_and_claim_no_folder(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mimicnorm: ")
    assert says in line
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["convert"], "Missing from mimicnorm convert"),
        (["convert", "resnet10", "--bach", "3"], "--batch INT"),
        (["convert", "resnet10", "--init", "None"], "none"),
        (["theory", "gians"], "Available subcommands: gains, figure, check, doctor"),
        ([*DIGITS, "--epochs", "many"], "--epochs"),
    ],
)
def test_mistakes_in_options_are_shown_by_the_parser(words, says, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""


def test_the_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"mimicnorm {project['version']}\n"


def test_import_is_lazy_and_complete():
    done = python(
        "import sys, mimicnorm as mn\nassert 'torch' not in sys.modules\n"
        "assert set(dir(mn)) == {*mn.__all__, '__version__'}\n"
        "missing = [n for n in dir(mn) if not hasattr(mn, n)]\nassert not missing, missing\n"
        "assert all(map(callable, (mn.convert, mn.convert_, mn.plan, mn.check, mn.init_)))\n"
        "assert 'torch' in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_a_closed_output_ends_silently_as_in_a_pipeline():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "mimicnorm", "theory", "gains"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("swallowed", [False, True])  # numpy swallows it and raises an error about a missing name
def test_ctrl_c_while_the_command_loads_is_one_line(swallowed):
    done = python(
        "import sys, os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs start without it
        "class Loading:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name != 'tyro': return\n"
        "        try: os.kill(os.getpid(), signal.SIGINT)\n"
        "        except KeyboardInterrupt:\n"
        f"            if {swallowed}: raise AttributeError('no such name') from None\n"
        "            raise\n"
        "sys.meta_path.insert(0, Loading())\n"
        "from mimicnorm.cli import main\n"
        "sys.exit(main(['theory', 'gains']))"
    )
    assert (done.returncode, done.stderr) == (130, "mimicnorm: interrupted\n")
