"""The command line: what it prints, writes and returns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import brainstate
import jax
import numpy as np
import pytest

from braintrace import tasks
from braintrace._cli import main
from braintrace._cli.options import CELLS, RULES
from braintrace._train.checkpoint import locked

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent

MODEL = """
import brainstate, braintrace, jax.numpy as jnp

class Net(brainstate.nn.Module):
    def __init__(self, units=4):
        super().__init__()
        self.conv = braintrace.nn.Conv2d(1, 2, kernel_size=3, padding="SAME")
        self.cell = braintrace.nn.GRUCell(32, units)
        self.readout = braintrace.nn.Linear(units, 2)

    def update(self, x):
        y = self.conv(x)
        return self.readout(self.cell(y.reshape(*y.shape[:-3], -1)))

class Wide(brainstate.nn.Module):
    def __init__(self, units):
        super().__init__()

def make():
    return Net(units=3)

made = make()
number = 3

def step(params, h, x):
    h = 0.9 * h + jnp.tanh(x @ params["w"])
    return h, h @ params["out"]

params = {"w": jnp.ones((3, 4)), "out": jnp.ones((4, 2))}
unbatched = jnp.zeros(4)

def start(batch_size):
    return jnp.zeros(((batch_size,) if batch_size else ()) + (4,))

def functions(units, batch_size=None):
    return step, {"w": jnp.ones((3, units)), "out": jnp.ones((units, 2))}, jnp.zeros((batch_size, units))

def haiku():
    import haiku as hk
    return hk.transform(lambda h, x: hk.GRU(4)(x, h)[::-1])
"""


@pytest.fixture(autouse=True)
def as_users_have_it(tmp_path, monkeypatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with (
        brainstate.environ.context(precision=32),
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


RAISES = """\
import brainstate
class Net(brainstate.nn.Module):
    def __init__(self, name="y"):
        super().__init__()
        self.size = {"y": 3}[name]
    def update(self, x):
        import jax
        def inner(x):
            return {}["z"]
        return jax.jit(inner)(x)
"""


@pytest.fixture
def model(tmp_path):
    name = f"model_{tmp_path.name.replace('-', '_')}"  # a module is imported once
    (tmp_path / f"{name}.py").write_text(MODEL)
    return name


@pytest.mark.parametrize(
    "command", ["", "train", "graph", "check", "compare", "plan", "bench", "tasks", "completion"]
)
def test_help_teaches(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "examples:" in shown
    assert f"braintrace {command}".strip() in shown


def test_no_command_and_versions(capsys):
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert "jax" in capsys.readouterr().out


def test_starts_without_jax():
    code = (
        "import sys; sys.argv[0] = 'bin/braintrace'; from braintrace._cli import main\n"
        "for words in sys.argv[1:]: main(words.split()); assert 'jax' not in sys.modules, words"
    )
    words = ["--help", "train --help", "tasks", "tasks copying", "completion bash", "--version"]
    subprocess.run([sys.executable, "-c", code, *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_what_is_imported_late_keeps_the_precision():
    code = (
        "import braintrace, jax; jax.config.update('jax_enable_x64', True); braintrace.nn; braintrace.fit\n"
    )
    code += "assert jax.numpy.ones(1).dtype == 'float64'; from braintrace import *; assert D_RTRL and fit"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_tables_fit_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    rules = ["--rules", "d_rtrl", "d_rtrl(window=2, rank=2)", "rtrl", "es_d_rtrl"]
    short = ["braintrace.nn:GRUCell(3, 4)", "--input", "3", "--length", "6"]
    for command in (
        ["compare", *short, *rules],
        ["plan", *short, *"--window 2 --rank 2 --basis pushed".split()],
    ):
        assert main(command) == 0
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= 80
        for whole in ("ES_D_RTRL", "memory" if command[0] == "compare" else "activations"):
            assert whole in shown
        assert "…" not in shown


def test_tasks(capsys):
    assert main(["tasks"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == tasks.names()
    assert main(["tasks", "copying"]) == 0
    shown = capsys.readouterr().out
    assert "delay=20" in shown
    assert "target 0.95" in shown
    assert main(["tasks", "copyng"]) == 2
    assert "did you mean 'copying'" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["Net", "Net(units=3)", "make", "made"])
def test_graph_of_ones_own_model(what, model, capsys):
    assert main(["graph", f"{model}:{what}", "--input", "1,4,4"]) == 0
    shown = capsys.readouterr().out
    assert "cell.Wz.weight" in shown
    assert "readout.weight" in shown


@pytest.mark.parametrize(
    ("spec", "options", "param", "exact"),
    [
        ("{model}.py:step", "--params params --carry start", "params.w", True),
        ("{model}:functions(4)", "", "params.w", True),
        ("{model}:haiku", "--carry start", "params.gru.w_i", False),
        ("equinox.nn:LSTMCell(3, 4)", "", "params.weight_ih", False),
        ("flax.nnx:GRUCell(3, 4)", "", "params.dense_i.kernel", False),
        ("flax.linen:SimpleCell(4)", "", "params.params.i.kernel", False),
    ],
)
def test_functions_and_modules_of_other_frameworks(spec, options, param, exact, model, capsys, tmp_path):
    given = [spec.format(model=model), *options.split(), "--input", "3", "--batch-size", "2"]
    assert main(["graph", *given, "--svg", str(tmp_path / "graph.svg")]) == 0
    assert re.search(rf"{param} .* found ", capsys.readouterr().out)
    assert param in (tmp_path / "graph.svg").read_text()
    window = [] if exact else ["--window", "2"]
    assert main(["check", *given, *window, "--length", "4", "--exact"]) == (0 if exact else 1)
    assert param in capsys.readouterr().out
    if options:
        assert main(["plan", *given, "--length", "4"]) == 0
        assert "BPTT" in capsys.readouterr().out


def test_graph_writes_files(model, tmp_path, capsys):
    files = {kind: tmp_path / "sub" / f"graph.{kind}" for kind in ("html", "svg", "dot")}
    options = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert main(["graph", f"{model}.py:Net", "--input", "1,4,4", "--batch-size", "2", *options]) == 0
    assert "f32[2,4]" in capsys.readouterr().out
    assert files["html"].read_text().lower().startswith("<!doctype html>")
    assert "<svg" in files["svg"].read_text()
    assert "digraph" in files["dot"].read_text()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nowhere_at_all:Net", "no module `nowhere_at_all`"),
        ("nowhere.py:Net", "no file nowhere.py"),
        ("{model}", "does not name a model"),
        ("{model}:Nett", "has no `Nett`. It has Net, Wide"),
        ("{model}:Wide", "Give arguments in the name"),
        ("{model}:Net(", "is not a name"),
        ("{model}:number", "neither a model"),
        ("{model}:step", "--params NAME --carry NAME"),
        ("{model}:haiku", "with --carry"),
        ("equinox.nn:GRUCell(3, 4) --batch-size 2 --carry {model}:unbatched", "first axis of 2"),
        ("{model}:start", "made <class"),
    ],
)
def test_graph_says_what_is_wrong(spec, words, model, capsys):
    spec, _, options = spec.format(model=model).partition(" --")
    assert main(["graph", spec, *f"--{options}".split() * bool(options), "--input", "1,4,4"]) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert "Traceback" not in shown


def test_errors_have_no_traceback_unless_asked_for(model, capsys, tmp_path):
    assert main(["graph", f"{model}:Net", "--input", "1,4,x"]) == 2
    assert main(["graph", f"{model}:Net"]) == 2
    assert main(["graph", f"{model}:Net", "--input", "7"]) == 1  # the model cannot take it
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert "--debug" in shown
    with pytest.raises(Exception, match=r".+"):
        main(["graph", f"{model}:Net", "--input", "7", "--debug"])
    (tmp_path / "raises.py").write_text(RAISES)
    for what, line in (("Net('x')", "5"), ("Net", "9")):
        assert main(["graph", f"raises:{what}", "--input", "7"]) == 1
        shown = capsys.readouterr().err
        assert f"raises:{what}: KeyError: " in shown
        assert f"raises.py:{line} (" in shown
        assert len(shown.splitlines()) == 2
    (tmp_path / "broken.py").write_text("x = 1\ny = x / 0\n")
    assert main(["graph", "broken:Net", "--input", "7"]) == 1
    assert "broken.py:2" in capsys.readouterr().err


def test_check(capsys):
    exact = ["check", "braintrace.nn:MiniGRU(3, 4)", "--input", "3", "--length", "4", "--exact"]
    assert main(exact) == 0
    assert "BPTT" in capsys.readouterr().out
    near = ["check", "braintrace.nn:ValinaRNNCell(3, 4)", "--input", "3", "--length", "4"]
    assert main(near) == 0
    assert main([*near, "--exact"]) == 1
    assert main([*near, "--exact", "--window", "2", "--rank", "4"]) == 0
    assert main([*near, "--rule", "eprop(kappa_filter_decay=0.9)"]) == 0
    assert "EProp" in capsys.readouterr().out
    assert main([*near, "--rule", "rtrl", "--window", "4"]) == 2
    assert "--window is not for --rule rtrl" in capsys.readouterr().err


def test_compare(model, capsys, tmp_path):
    rules = ["--rules", "d_rtrl", "d_rtrl(window=2)", "rtrl"]
    short = ["--input", "3", "--length", "6", *rules]
    assert main(["compare", "braintrace.nn:GRUCell(3, 4)", *short, "--out", "new/out"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"4 RTRL.* +exact", shown)
    assert "3 D_RTRL, windows of 2" in shown
    assert re.search(r"^\* (Take|No online)", shown, re.MULTILINE)
    assert "drawn at random" in " ".join(shown.split())
    data = json.loads((tmp_path / "new" / "out" / "comparison.json").read_text())
    assert [row["rule"] for row in data["rows"]] == ["BPTT", "D_RTRL", "D_RTRL, windows of 2", "RTRL"]
    assert {p.name for p in (tmp_path / "new" / "out").iterdir()} >= {"comparison.html", "frontier.svg"}
    step = ["--params", "params", "--carry", "start", "--input", "3", "--length", "6", "--train", "2"]
    assert main(["compare", f"{model}:step", *step, "--batch-size", "2", "--rules", "d_rtrl"]) == 0
    assert re.search(r"2 D_RTRL.* +exact", capsys.readouterr().out)


def test_compare_on_a_task_and_on_data(capsys):
    task = ["--task", "copying", "--set", "delay=3", "--hidden", "4", "--batch-size", "2"]
    assert main(["compare", *task, "--rules", "d_rtrl", "--train", "2"]) == 0
    assert "loss after 2" in capsys.readouterr().out
    np.savez("mine.npz", xs=np.ones((6, 2, 3), np.float32), ys=np.zeros((6, 2), int))
    assert main(["compare", "braintrace.nn:GRUCell(3, 4)", "--data", "mine.npz", "--rules", "d_rtrl"]) == 0
    assert "2 D_RTRL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "There are no data"),
        ("--rules d_rtl", "did you mean 'd_rtrl'"),
        ("--rules d_rtrl(3)", "options by name"),
        ("--task copyng", "did you mean 'copying'"),
        ("--task copying --data mine.npz", "not both"),
        ("--data nothing.npz", "nothing.npz"),
        ("braintrace.nn:GRUCell(3,4) --task copying --cell gru", "not both"),
    ],
)
def test_compare_says_what_is_wrong(arguments, words, capsys):
    assert main(["compare", *arguments.split()]) == 2
    assert words in capsys.readouterr().err


def test_plan(capsys):
    assert (
        main(
            [
                "plan",
                "braintrace.nn:ValinaRNNCell(3, 4)",
                "--input",
                "3",
                "--batch-size",
                "2",
                "--length",
                "4",
                "--window",
                "2",
                "--rank",
                "1",
                "--devices",
                "2",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "on each of 2 devices (2 data)" in shown
    assert "D_RTRL" in shown
    assert "D_RTRL, windows of 2, rank 1" in shown
    assert "BPTT" in shown


def test_bench(capsys):
    sizes = ["--inputs", "2", "--hidden", "3", "--batch-size", "2", "--length", "3"]
    assert main(["bench", "--cell", "rnn", *sizes]) == 0
    assert "ES_D_RTRL" in capsys.readouterr().out
    assert main(["bench", "quick"]) == 2


TRAIN = [
    *"train --task copying --set delay=2 --set symbols=1 --cell rnn --hidden 4 --batch-size 2".split(),
    *"--eval-every 4 --checkpoint-every 3 --out run".split(),
]


def test_train_and_resume(tmp_path, capsys):
    assert main([*TRAIN, "--batches", "6"]) == 0
    found = {p.name for p in (tmp_path / "run").iterdir()}
    assert found >= {"metrics.jsonl", "config.json", "curves.svg", "report.html", "checkpoints"}
    assert json.loads((tmp_path / "run" / "config.json").read_text())["window"] == 10
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Learning curves" in page
    assert "Learned with D_RTRL, windows of 10." in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    assert main([*TRAIN, "--batches", "6"]) == 2
    assert "--resume" in capsys.readouterr().err
    for other in (["--hidden", "5"], ["--window", "2"]):
        assert main(["train", "--out", "run", "--resume", *other]) == 2
        assert "cannot go on" in capsys.readouterr().err
    assert main(["train", "--out", "run", "--resume", "--batches", "8"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    numbers = [line["batch"] for line in lines if line["kind"] == "train"]
    assert numbers == list(range(1, 9))
    capsys.readouterr()
    assert main(["train", "--out", "run", "--resume", "--batches", "8"]) == 0
    assert "Nothing was left to do: the run has had its 8 batches already." in capsys.readouterr().out
    assert all(a["seconds"] <= b["seconds"] for a, b in pairwise(lines))


OWN = """\
from pathlib import Path
import braintrace
Path("imported").touch()
def make():
    return braintrace.nn.ValinaRNNCell(10, 9)
"""


def test_resume_imports_only_what_the_user_names(tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    (out / "inside").mkdir(parents=True)
    for name in ("own_of_user.py", "run/own_of_run.py", "run/inside/__init__.py"):
        (tmp_path / name).write_text(OWN)
    resume = ["train", "--out", str(out), "--resume", "--batches", "1"]

    def refused(model, *more):
        kept = {"task": "copying", "set": {"delay": 1}, "hidden": 3, "batch_size": 2, "model": model}
        (out / "config.json").write_text(json.dumps(kept))
        assert main([*resume, *more]) == 2
        assert not any(path.exists() for path in (tmp_path / "imported", out / "imported"))
        return capsys.readouterr().err

    assert "--model 'own_of_user:make', or add --trust" in refused("own_of_user:make")
    assert "inside of this folder" in refused(f"{out}/own_of_run.py:make", "--trust")
    with monkeypatch.context() as inside:
        inside.chdir(out)
        assert "inside of this folder" in refused("own_of_run:make", "--trust")
        assert "inside of this folder" in refused("inside:make", "--trust")
    refused("own_of_user:make")
    assert main([*resume, "--trust"]) == 0
    assert (tmp_path / "imported").exists()
    assert main([*resume, "--model", "own_of_user:make"]) == 0


def test_two_runs_cannot_share_a_folder(tmp_path, capsys):
    with locked(tmp_path / "run"):
        assert main([*TRAIN, "--batches", "1"]) == 1
        assert f"run is in use by another run (process {os.getpid()} on" in capsys.readouterr().err
        assert not (tmp_path / "run" / "config.json").exists()
    # of a process that is killed the file stays, and the system releases the lock
    hold = 'import fcntl; f = open("run/.lock", "a"); fcntl.flock(f, 2); print(flush=True); input()'
    child = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    assert main([*TRAIN, "--batches", "1"]) == 1
    child.kill()
    child.communicate()
    assert main([*TRAIN, "--batches", "1"]) == 0


def test_an_interrupted_run_returns_130(monkeypatch, capsys):
    made = tasks.Task.batch

    def batch(self, seed, index, *rest):
        if index == 2:
            signal.raise_signal(signal.SIGINT)
        return made(self, seed, index, *rest)

    monkeypatch.setattr(tasks.Task, "batch", batch)
    assert main([*TRAIN, "--batches", "6"]) == 130
    assert "--out run --resume" in capsys.readouterr().out


def test_a_run_that_diverges_returns_1(capsys):
    assert main([*TRAIN, "--batches", "30", "--optimizer", "sgd", "--lr", "1e38", "--clip", "0"]) == 1
    shown = capsys.readouterr().err
    assert "at batch" in shown
    assert "checkpoint" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "--task"),
        ("--task nothing", "no task 'nothing'"),
        ("--task copying --set delay", "NAME=VALUE"),
        ("--task copying --set dely=3", "no option 'dely'"),
        ("--task copying --optimizer adm", "no optimiser 'adm'"),
        ("--task copying --update-every 0", "--update-every"),
        ("--task copying --cell gru --model a:b", "not both"),
        ("--task copying --model file.py:step", "step function is trained with `braintrace.online`"),
        (
            "--task copying --set delay=abc",
            "--set: The option 'delay' of the task 'copying' is a whole number",
        ),
        ("--task copying --set delay=-3", "of at least 0, such as 20, not -3"),
        ("--task copying --lr -1", "--lr is a learning rate above 0, such as 0.005, not -1"),
        ("--task copying --lr 0", "--lr"),
        ("--task copying --lr nan", "--lr"),
        ("--task copying --clip -1", "--clip"),
        ("--task copying --seed -1", "--seed"),
        ("--task copying --rule bptt --window 5", "--window is not for --rule bptt; d_rtrl takes it"),
        ("--task copying --rule es_d_rtrl --rank 2", "--rank is not for --rule es_d_rtrl"),
        ("--task copying --rule eprp", "did you mean 'eprop'"),
        ("--task copying --rule ottt", "'ottt(leak=...)'"),
        ("--task copying --rule eprop(leek=1)", "no option 'leek'"),
        ("--task copying --optimizer chain", "--optimizer: optax.chain cannot be used here"),
        ("--task copying --optimizer contrib", "--optimizer: optax.contrib cannot be used here"),
        ("--task copying --optimizer lbfgs", "--optimizer: optax.lbfgs cannot be used here"),
        ("--task copying --out file", "--out file: file is a file"),
        ("--task copying --out=", "--out: the name is empty"),
        ("--taks copying", "did you mean --task?"),
        ("--task copying --batchsize 3", "did you mean --batch-size?"),
        ("--task copying --out file/run", "/file is a file"),
        ("--resume", "--resume needs --out FOLDER"),
        ("--out nowhere --resume", "--resume: there is no run in nowhere"),
        ("--out file --resume", "file is a file"),
        ("--out cut --resume", "config.json is damaged (Expecting"),
        ("--out wrong --resume", "config.json is damaged (hidden is 'x')"),
    ],
)
def test_train_says_what_is_wrong(arguments, words, capsys, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "file.py").write_text("def step(params, carry, x):\n    return carry, x\n")
    for name, text in (("cut", '{"task": "copying", '), ("wrong", '{"task": "copying", "hidden": "x"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    assert main(["train", *arguments.split()]) == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert words in message
    assert "--help" in hint


@pytest.mark.parametrize("cell", ["rnn", "mgu", "lru", "lif", "alif"])
def test_cells_make_nets(cell):
    from braintrace._cli.models import time_step
    from braintrace._cli.nets import RATE, make_net

    assert cell in CELLS
    assert {*CELLS} == {*RATE, "lru", "lif", "alif"}
    task = tasks.get("copying", delay=2, symbols=1)
    with time_step():
        net = make_net(cell, task, 4)
        brainstate.nn.init_all_states(net, batch_size=2)
        assert net(jax.numpy.ones((2, task.inputs))).shape == (2, task.outputs)


def test_rules_are_those_of_the_table():
    from braintrace._cli.rules import learner_of
    from braintrace._learners.rule_choice import NAMES

    assert [*NAMES] == RULES
    assert learner_of("osttp", {}, num_targets=3)[1] == {"num_targets": 3}


@pytest.mark.parametrize(
    "rule",
    [
        "osttp",
        pytest.param("ottt(leak=0.9)", marks=pytest.mark.slow),
        pytest.param("snap(n=1)", marks=pytest.mark.slow),
    ],
)
def test_any_rule_trains(rule, capsys):
    options = "--set delay=1 --cell lif --hidden 3 --batches 1 --batch-size 2 --eval-every 1".split()
    assert main(["train", "--task", "copying", "--rule", rule, *options]) == 0
    assert "results are in runs/copying-lif-" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell, capsys, tmp_path):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("train", "graph", "es_d_rtrl", "kf_rtrl", "mackey_glass", "update-every"):
        assert word in script
    if shell == "bash":
        ask = 'COMP_WORDS=(braintrace train --rule es_); COMP_CWORD=3; _braintrace; echo "${COMPREPLY[@]}"'
        found = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
        assert found.stdout.split() == ["es_d_rtrl"]
