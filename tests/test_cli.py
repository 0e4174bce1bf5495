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


@pytest.fixture(autouse=True)
def _zoo():
    zoo.timm()


def test_convert_prints_the_plan_and_the_saving(capsys):
    assert main(["convert", "timm:resnet18", "--method", "mimicnorm", "--image", "64"]) == 0
    out = capsys.readouterr().out
    assert "layer4.1.conv2" in out
    assert "20 BatchNorms (20 removed" in out
    assert "saved for backward per sample of 3 x 64 x 64" in out


def test_convert_as_json(capsys):
    assert main(["convert", "torchvision:resnet18", "--image", "64", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["totals"]["centred"] == 20
    assert 0.4 < data["saved_bytes"]["ratio"] < 0.6


def test_a_factory_of_the_users_own(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Conv1d(2, 8, 30), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 3, 1))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "mine:net", "--shape", "4", "2", "64"]) == 0
    assert "1 BatchNorm (1 removed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["compaer"], "there is no verb 'compaer'; mimicnorm --help explains them. Did you mean compare"),
        ([], "give a verb"),
        (["--verbose", "convert"], "there is no verb '--verbose'"),
        (["convert", "resnet5"], "Did you mean resnet50"),
        (["convert", "timm:resnet5O"], "Did you mean resnet50"),
        (["convert", "no.such.module:net"], "there is no module 'no'"),
        (["convert", "timm:resnet18", "--method", "mimik"], "Did you mean mimicnorm"),
        (["convert", "torchvision:alexnet"], "no BatchNorm"),
        (["convert", "torchvision:resnet18", "--shape", "2", "3"], "forward raised on the example"),
        (["convert", "torchvision:resnet18", "--head", "nowhere"], "head= names no module"),
        (["convert", "torchvision:resnet18", "--image", "64", "--allow-mixing", "nowhere"], "qualified module names"),
        (["memory", "torchvision:resnet18", "--budget", "lots"], "lots"),
        (["theory", "figure", "nothing"], "choose one of"),
        (["theory", "figure", "phase", "--out", ""], "cannot draw to"),
        (["theory", "figure", "phase", "--out", "/no/such/place/a.png"], "there is no directory"),
        (["theory", "doctor", "resnet10", "--plot", "a.xyz"], "is not an image format"),
        (["theory", "check", "--seed", "9" * 20], "--seed must be at least 0 and below 2^63"),
        (["theory", "figure", "phase", "--seed", "-1"], "--seed must be at least 0"),
        (["convert", "resnet10", "--init", "None"], "use one of auto, theory, calibrate, keep, none"),
        (["memory", "resnet10", "--image", "64", "--shape", "2", "3", "32", "32"], "of different sizes: give one"),
        *((words, "the shape is empty") for words in (["convert", "mlp10", "--shape"], ["memory", "mlp10", "--shape"])),
        (["convert", "resnet10", "--image", "32", "--batch", "1"], "use --batch 2 or more"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(words, says, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("mimicnorm: ")
    assert says in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["convert"], "Missing from mimicnorm convert"),
        (["convert", "resnet10", "--bach", "3"], "--batch INT"),
        (["convert", "resnet10", "--batch", "x"], "Error parsing --batch"),
        (["theory", "gians"], "Available subcommands: gains, figure, check, doctor"),
        (["train", "digits-resnet10", "--epochs", "many"], "--epochs"),
    ],
)
def test_mistakes_in_options_are_shown_by_the_parser(words, says, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""


def test_memory_table_and_json(capsys, tmp_path):
    plot = tmp_path / "memory.png"
    words = ["memory", "torchvision:resnet18", "--batch", "4", "--image", "64", "--budget", "1GiB", "--plot", str(plot)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "mimicnorm" in out
    assert "nonorm" in out
    assert plot.stat().st_size > 1000
    assert main(["memory", "torchvision:resnet18", "--batch", "4", "--image", "64", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["methods"]
    assert rows["mimicnorm"]["saved_bytes"] < 0.6 * rows["batchnorm"]["saved_bytes"]


def test_theory_commands(capsys, tmp_path):
    assert main(["theory", "gains"]) == 0
    assert "1.7129" in capsys.readouterr().out
    assert main(["theory", "doctor", "torchvision:resnet18", "--image", "32", "--batch", "2"]) == 0
    assert "layer4.1.conv2" in capsys.readouterr().out
    assert main(["theory", "figure", "transitions", "--out", str(tmp_path / "t.png")]) == 0
    assert (tmp_path / "t.png").exists()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb, capsys):
    for words in (["--help"], [verb, "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
        assert verb in capsys.readouterr().out


def test_the_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"mimicnorm {project['version']}\n"


MISTYPED = (
    ["compaer"],
    ["convert", "resnet81"],
    ["convert", "resnet18", "--method", "mimik"],
    ["memory", "resnet18", "--methods", "batchnorm, mimik"],
    ["theory", "doctor", "resnet81"],
    ["compare", "--methods", "mimik+residual=linear:2"],
    ["train", "digits-resnet10", "--model", "resnet81"],
)


def test_help_and_mistyped_names_do_not_wait_for_torch():
    code = (
        "import sys\nfrom mimicnorm.cli import main\nfrom mimicnorm.cli.verbs import VERBS\n"
        "def run(*words):\n"
        "    try: return main(words)\n"
        "    except SystemExit as exit: return exit.code\n"
        "assert run('--help') == 0 and 'tyro' not in sys.modules\n"
        f"assert all(run(*words) == 2 for words in {MISTYPED!r})\n"
        "assert all(run(verb, '--help') == 0 for verb in VERBS)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line, words in zip(done.stderr.splitlines(), MISTYPED, strict=True):
        assert f"{words[-1]!r}" in line or "mimik" in line
        assert "Did you mean " in line


def test_dir_shows_public_names_only():
    import mimicnorm as mn

    assert set(dir(mn)) == {*mn.__all__, "__version__"}
    assert all(hasattr(mn, name) for name in dir(mn))


def test_import_is_lazy_and_complete():
    code = (
        "import sys, mimicnorm as mn\nassert 'torch' not in sys.modules\n"
        "missing = [n for n in mn.__all__ if not hasattr(mn, n)]\nassert not missing, missing\n"
        "assert all(map(callable, (mn.convert, mn.convert_, mn.plan, mn.check, mn.init_)))\n"
        "assert 'torch' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_closed_output_ends_silently_as_in_a_pipeline():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "mimicnorm", "theory", "gains"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("swallowed", [False, True])  # numpy swallows it and raises an error about a missing name
@pytest.mark.parametrize("module", ["tyro", "rich.console"])
def test_ctrl_c_while_the_command_loads_is_one_line(module, swallowed):
    code = (
        "import sys, os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs start without it
        "class Loading:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name != {module!r}: return\n"
        "        try: os.kill(os.getpid(), signal.SIGINT)\n"
        "        except KeyboardInterrupt:\n"
        f"            if {swallowed}: raise AttributeError('no such name') from None\n"
        "            raise\n"
        "sys.meta_path.insert(0, Loading())\n"
        "from mimicnorm.cli import main\n"
        "sys.exit(main(['theory', 'gains']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "mimicnorm: interrupted\n")
