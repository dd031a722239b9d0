"""`fit` does what a loop written by hand does, and stops, saves and goes on as it says."""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace._rules.deferred import is_pending
from braintrace._train.result import to_columns, to_rows
from braintrace.tasks import task as tasks

from .nets import BATCH, IN, LENGTH, UNITS, Net, batch, close, epoch, long_run, make

pytestmark = pytest.mark.slow


def parameters(learner):
    return {".".join(k): st.value for k, st in learner.param_states.items()}


def same(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def by_hand(rule, update_every, batches):
    """Online training in a plain loop: the parameters afterwards."""
    learner, _ = make(rule)
    brainstate.nn.init_all_states(learner.model, batch_size=BATCH)
    learner.compile_graph(jnp.zeros((BATCH, IN)))
    params = learner.param_states
    optimizer = optax.adam(1e-2)
    value = lambda: {k: st.value for k, st in params.items()}
    opt_state = optimizer.init(value())
    losses = lambda x, y: jnp.mean((learner(x) - y) ** 2)
    size = LENGTH if update_every == "sequence" else update_every

    @brainstate.transform.jit
    def gradient(xs, ys):
        def total():
            found = [losses(x, y) for x, y in zip(xs, ys, strict=True)]
            return sum(found) / len(found)

        return brainstate.transform.grad(total, params)()

    for xs, ys, _ in batches:
        learner.reset_state(BATCH)
        for at in range(0, LENGTH, size):
            grads = gradient(xs[at : at + size], ys[at : at + size])
            updates, opt_state = optimizer.update(dict(grads), opt_state)
            for key, new in optax.apply_updates(value(), updates).items():
                params[key].value = new
    return parameters(learner)


@pytest.mark.parametrize(
    ("rule", "update_every"),
    [
        (braintrace.D_RTRL, 3),
        (braintrace.D_RTRL, 1),
        (braintrace.BPTT, "sequence"),
    ],
)
def test_equals_a_loop_by_hand(rule, update_every):
    batches = [batch(0), batch(1)]
    learner, loss = make(rule)
    result = braintrace.fit(
        learner, batches, loss, optax.adam(1e-2), update_every=update_every, progress=False
    )
    assert [r["batch"] for r in result.history] == [1, 2]
    assert str(result) == f"<FitResult: 2 batches, loss {result.history[-1]['loss']:.4g}>"
    same(parameters(learner), by_hand(rule, update_every, batches), rtol=1e-4, atol=1e-6)


def test_windows_are_those_of_the_learner(tmp_path):
    batches = [batch(0), batch(1)]
    learner, loss = make()
    brainstate.nn.init_all_states(learner.model, batch_size=BATCH)
    learner.compile_graph(batches[0][0][0])
    go = functools.partial(braintrace.fit, batches=batches, optimizer=optax.adam(1e-2), progress=False)
    go(learner, step_fn=loss, window=3, rank=UNITS, checkpoint_dir=tmp_path)
    assert (learner.vjp_method, learner.window, learner.rule.rank) == ("multi-step", 3, UNITS)
    exact, its_loss = make(braintrace.BPTT)
    go(exact, step_fn=its_loss)
    same(parameters(learner), parameters(exact), rtol=1e-4, atol=1e-6)
    with pytest.warns(UserWarning, match="`window` was 3 and is 2; `rank` was 5 and is 1"):
        go(learner, step_fn=loss, window=2, rank=1, checkpoint_dir=tmp_path, resume=True)
    for wrong, options, words in (
        (exact, {"window": 2}, "BPTT has neither `window` nor `rank`"),
        (braintrace.RTRL(Net()), {"rank": 1}, "RTRL has neither"),
        (braintrace.ES_D_RTRL(Net()), {"rank": 1}, "ES_D_RTRL has no `rank`"),
        (learner, {"window": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            go(wrong, step_fn=loss, **options)


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_bptt_equals_grad_through_a_scan(chunk_size):
    learner, loss = make(braintrace.BPTT)
    xs, ys, mask = batch(0)
    mask = np.array([1, 0, 1, 2], np.float32)
    brainstate.nn.init_all_states(learner.model, batch_size=BATCH)
    learner.compile_graph(xs[0])
    grads, losses, outs = learner.etrace_grad(
        xs, ys, step_fn=loss, mask=mask, chunk_size=chunk_size, has_aux=True, return_value=True
    )
    cell, readout = learner.model.cell, learner.model.readout
    values = {k: st.value for k, st in learner.param_states.items()}

    def total(values):
        def linear(name, x):
            w = values[name]
            return x @ w["weight"] + w["bias"]

        def step(h, slices):
            x, y, m = slices
            h = jnp.tanh(linear(("cell", "W", "weight"), jnp.concatenate([x, h], -1)))
            out = linear(("readout", "weight"), h)
            return h, (m * jnp.mean((out - y) ** 2), out)

        _, (losses, outs) = jax.lax.scan(step, jnp.zeros((BATCH, cell.out_size[-1])), (xs, ys, mask))
        return losses.sum() / mask.sum(), outs

    (value, expected_outs), expected = jax.value_and_grad(total, has_aux=True)(values)
    same(dict(grads), expected, rtol=1e-4, atol=1e-6)
    same(outs, expected_outs, rtol=1e-5, atol=1e-6)
    assert readout is learner.model.readout
    assert float((losses * mask).sum() / mask.sum()) == pytest.approx(float(value), rel=1e-5)


def test_compiles_once_and_again_for_a_last_small_batch():
    learner, loss = make()
    traced = []

    def counted(x, y):
        traced.append(x.shape)
        return loss(x, y)

    counts = []

    def batches(number):
        counts.append(len(traced))
        return [batch(0), batch(1), batch(2, size=2)]

    result = braintrace.fit(learner, batches, counted, optax.sgd(0.1), epochs=3, progress=False)
    assert counts[1] == counts[2] == len(traced)
    assert {BATCH, 2} == {shape[0] for shape in traced}
    assert learner.model.cell.h.value.shape[0] == 2
    assert result.batches == 9
    assert all(np.isfinite(r["loss"]) for r in result.history)


def test_masked_windows_make_no_update():
    learner, loss = make()
    xs, ys, mask = batch(0)
    mask[:] = 0
    fresh, _ = make()
    start = parameters(fresh)
    braintrace.fit(learner, [(xs, ys, mask)], loss, optax.adam(0.1), update_every=2, progress=False)
    same(parameters(learner), start)


def test_evaluation_changes_nothing_and_is_right():
    plain, watched = [make()[0] for _ in range(2)]
    data, test = [batch(i) for i in range(4)], [batch(7), batch(8, size=2)]

    def run(learner, **options):
        def loss(x, y):
            out = learner(x)
            return jnp.mean((out - y) ** 2), {"size": jnp.mean(jnp.abs(out))}

        return braintrace.fit(learner, data, loss, optax.adam(1e-2), progress=False, **options)

    a = run(plain)
    b = run(watched, eval_batches=test, eval_every=1)
    assert [r["loss"] for r in a.history] == [r["loss"] for r in b.history]
    assert [r["batch"] for r in b.evaluations] == [1, 2, 3, 4]
    expected = []
    for xs, ys, _ in test:
        brainstate.nn.reset_all_states(watched.model, batch_size=xs.shape[1])
        outs = brainstate.transform.for_loop(watched.model, xs)
        expected.append((float(jnp.mean((outs - ys) ** 2)), float(jnp.mean(jnp.abs(outs)))))
    loss, size = np.average(expected, axis=0, weights=[BATCH, 2])
    assert b.metrics == pytest.approx({"loss": loss, "size": size}, rel=1e-5)


def adaptive(model):
    return braintrace.EProp(model, feedback="adaptive")


@pytest.mark.parametrize("rule", [braintrace.UORO, adaptive])
def test_a_resumed_run_goes_on_with_what_outlasts_a_sequence(rule, tmp_path):
    """Random signs and adaptive feedback are not reset, are shared by batch sizes, and are saved."""
    data = [batch(0), batch(1, size=2), batch(2), batch(3, size=2)]

    def run(batches, **options):
        learner, loss = make(rule)
        braintrace.fit(learner, batches, loss, optax.sgd(0.1), progress=False, **options)
        return learner, parameters(learner)

    learner, whole = run(data)
    run(data[:3], checkpoint_dir=tmp_path)
    same(whole, run(data, checkpoint_dir=tmp_path, resume=True)[1], rtol=0)
    if rule is braintrace.UORO:
        assert int(learner.etrace_states["draws so far"].value[0]) == len(data) * LENGTH


class Sum(brainstate.nn.Module):
    """Adds up its inputs in a state that is made in `__init__`; its weight is one."""

    def __init__(self, start=0.0):
        super().__init__()
        self.w = brainstate.ParamState(jnp.eye(1))
        self.held = [brainstate.HiddenState(jnp.full((BATCH, 1), start))]

    def update(self, x):
        (h,) = self.held
        h.value = h.value + braintrace.matmul(x, self.w.value)
        return h.value


class SumWithInit(Sum):
    def init_state(self, batch_size=None):
        self.held[0] = brainstate.HiddenState(jnp.zeros((batch_size, 1)))


class SumWithReset(Sum):
    def reset_state(self, batch_size=None):
        self.held[0].value = jnp.zeros((batch_size, 1))


class SumNeverReset(Sum):
    def reset_state(self, batch_size=None):
        pass


class Sums(brainstate.nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = parts

    def update(self, x):
        return jnp.concatenate([part(x) for part in self.parts], -1)


def test_hand_written_modules_are_reset(tmp_path):
    xs = np.ones((LENGTH, BATCH, 1), np.float32)
    data = [(xs, np.cumsum(xs, 0) + np.zeros(3, np.float32))] * 4

    def run(batches=data, rate=0.0, **options):
        learner = braintrace.D_RTRL(Sums(Sum(), SumWithInit(5.0), SumWithReset(5.0)))
        loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)
        options = {"eval_batches": data[:1], "eval_every": 1, "progress": False, **options}
        return learner, braintrace.fit(learner, batches, loss, optax.sgd(rate), **options)

    learner, result = run()
    assert [row["loss"] for row in (*result.history, *result.evaluations)] == [0.0] * 8
    for copied in (copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))):
        copied.reset_state(rows=jnp.arange(BATCH) == 1)
        assert [part.held[0].value[:2, 0].tolist() for part in copied.model.parts] == [[LENGTH, 0]] * 3
    # a resumed run resets to the values of its own new learner, not to those in the checkpoint
    whole = run(rate=0.1)[1]
    run(data[:2], 0.1, checkpoint_dir=tmp_path)
    again = run(rate=0.1, checkpoint_dir=tmp_path, resume=True)[1]
    assert [row["loss"] for row in again.history] == [row["loss"] for row in whole.history]
    forgetful = braintrace.D_RTRL(Sums(Sum(), SumNeverReset()))
    loss = lambda x, _: jnp.sum(forgetful(x))
    with pytest.warns(UserWarning, match=r"A reset leaves `parts\.1\.held\.0` as it is"):
        braintrace.fit(forgetful, data[:1], loss, optax.sgd(0.0), progress=False)


def test_stops_when_asked():
    learner, loss = make()
    result = braintrace.fit(
        learner,
        epoch,
        loss,
        optax.adam(1e-2),
        max_batches=50,
        stop_when=lambda r: r["batch"] >= 3,
        progress=False,
    )
    assert result.reached
    assert result.batches == 3


def test_going_on_without_reset_streams():
    long = batch(3, length=2 * LENGTH)
    halves = [tuple(a[:LENGTH] for a in long), tuple(a[LENGTH:] for a in long)]
    once, cut = make(), make()
    options = {"update_every": 2, "progress": False}
    braintrace.fit(once[0], [long], once[1], optax.sgd(0.1), **options)
    braintrace.fit(cut[0], halves, cut[1], optax.sgd(0.1), reset=False, **options)
    same(parameters(once[0]), parameters(cut[0]), rtol=1e-5, atol=1e-6)


def test_a_stream_with_pending_steps_goes_on_where_there_are_none(tmp_path, pending):
    data = [batch(n) for n in range(3)]
    options = {"reset": False, "update_every": 1, "progress": False}

    def run(batches, **more):
        brainstate.random.seed(0)
        learner = braintrace.D_RTRL(braintrace.nn.GRUCell(IN, 2))
        loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)
        braintrace.fit(learner, batches, loss, optax.sgd(0.1), **options, **more)
        return parameters(learner), any(map(is_pending, learner.traces))

    pending(False)
    whole, _ = run(data)
    pending(True)
    _, had_pending = run(data[:2], checkpoint_dir=tmp_path)
    pending(False)
    resumed, _ = run(data, checkpoint_dir=tmp_path, resume=True)
    assert had_pending
    same(whole, resumed, rtol=1e-4, atol=1e-6)


def test_stops_at_what_is_not_finite(tmp_path):
    learner, _ = make()
    loss = lambda x, y: jnp.mean((learner(x) - y) ** 4)
    poisoned = batch(12)
    poisoned[1][2] = 1e15
    data = [*(batch(i) for i in range(6)), poisoned, batch(13)]
    with pytest.raises(braintrace.DivergedError) as caught:
        braintrace.fit(
            learner, data, loss, optax.adam(1e-2), checkpoint_dir=tmp_path, checkpoint_every=4, progress=False
        )
    error = caught.value
    assert (error.batch, error.step) == (7, 2)
    assert "cell.W.weight" in error.parameters
    assert error.checkpoint == tmp_path / "4"
    for word in ("batch 7", "step 2", "cell.W.weight", str(tmp_path / "4"), "clip_by_global_norm"):
        assert word in str(error)
    assert len(error.result.history) == 6
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(parameters(learner)))
    for i, name in enumerate(("xs", "ys")):
        data = batch(0)
        data[i][3, 1, 1] = np.nan
        with pytest.raises(
            braintrace.DivergedError, match=rf"`{name}` of this batch has nan at \[3, 1, 1\]"
        ) as caught:
            braintrace.fit(learner, [data], loss, optax.adam(1e-2), progress=False)
        assert "learning rate" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "update_every"), [(braintrace.D_RTRL, "sequence"), (braintrace.ES_D_RTRL, 1)]
)
def test_the_mask_wins_over_what_is_not_finite(rule, update_every):
    found = []
    for filler in (0.0, np.nan):
        learner, loss = make(rule)
        xs, ys, mask = batch(0)
        mask[[0, 2]] = 0
        ys[[0, 2]] = filler
        result = braintrace.fit(
            learner,
            [(xs, ys, mask)] * 2,
            loss,
            optax.sgd(0.1),
            update_every=update_every,
            metrics={"error": tasks.mse},
            eval_batches=[(xs, ys, mask)],
            progress=False,
        )
        found.append((parameters(learner), without_time(result)))
    same(found[0], found[1], rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"update_every": 1}, {"window": 3}])
def test_a_mask_for_each_step_and_sample(options):
    xs, ys, _ = batch(0)
    mask = np.array([[1, 0, 1, 2], [0, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0.5]], np.float32)
    ys[mask == 0] = np.nan
    eval_mask = mask[:, ::-1].copy()
    of_sample = lambda out, y: jnp.mean((out - y) ** 2, -1)

    def go(step_of, metric, data, data_to_evaluate):
        learner, _ = make()
        optimizer, shown = optax.sgd(0.1), {"metrics": {"error": metric}, "eval_batches": data_to_evaluate}
        result = braintrace.fit(
            learner, data, step_of(learner), optimizer, **shown, **options, progress=False, max_batches=2
        )
        return parameters(learner), without_time(result)

    def of_samples(learner):
        def step(x, y):
            out = learner(x)
            return of_sample(out, y), out

        return step

    def of_batch(learner):  # the same weighing by hand, with a number for each step
        def step(x, y):
            out, (y, m) = learner(x), y
            return jnp.sum(m * of_sample(out, y)) / jnp.maximum(m.sum(), 1e-6), out

        return step

    clean = np.nan_to_num(ys)
    by_hand = lambda m: (xs, (clean, m), m.sum(1))
    ragged = [(xs, ys, m) for m in (mask, eval_mask)]
    shown = go(of_samples, tasks.mse, ragged[:1] * 2, [(xs, clean, eval_mask), (xs, clean, mask)])
    mse = lambda outs, ys, _: tasks.mse(outs, *ys)
    same(shown, go(of_batch, mse, [by_hand(mask)] * 2, [by_hand(eval_mask), by_hand(mask)]), rtol=1e-5)


def test_warns_of_a_batch_that_comes_first():
    learner, loss = make()
    brainstate.nn.init_all_states(learner.model, batch_size=7)
    xs, ys, _ = (np.swapaxes(a, 0, 1) if a.ndim > 1 else a for a in batch(0, size=7))
    with pytest.warns(UserWarning, match="If it is the batch, swap the first two axes"):
        braintrace.fit(learner, [(xs, ys)], loss, optax.sgd(0.1), progress=False)


def test_warns_of_parameters_that_are_not_the_models():
    learner, _ = make()
    head = brainstate.nn.Linear(2, 2)
    loss = lambda x, y: jnp.mean((head(learner(x)) - y) ** 2)
    with pytest.warns(UserWarning, match=r"`fit` does not learn them: `head.weight`\.") as caught:
        braintrace.fit(learner, [batch(0)] * 2, loss, optax.sgd(0.1), progress=False)
    assert [w.filename for w in caught] == [__file__]


def rows(folder):
    return [
        {k: v for k, v in json.loads(line).items() if k != "seconds"}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def without_time(result):
    return [
        [{k: v for k, v in r.items() if k != "seconds"} for r in rs]
        for rs in (result.history, result.evaluations)
    ]


@functools.cache
def whole_run():
    folder = Path(tempfile.mkdtemp())
    try:
        return long_run(folder), rows(folder)
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    whole, expected = whole_run()
    killed = tmp_path / "killed"
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.train.nets", str(killed)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    deadline = time.monotonic() + 120
    while not (killed / "checkpoints" / "10").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(rows(killed)) < len(expected)
    resumed = long_run(killed)
    assert without_time(resumed) == without_time(whole)
    assert rows(killed) == expected
    assert resumed.checkpoint == killed / "checkpoints" / "35"
    assert sorted(int(p.name) for p in (killed / "checkpoints").iterdir() if p.is_dir()) == [25, 30, 35]


@pytest.mark.parametrize("number_of_signal", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves(number_of_signal, tmp_path):
    whole, _ = whole_run()

    def batches(number):
        for i, found in enumerate(epoch(number)):
            if (number, i) == (1, 2):
                signal.raise_signal(number_of_signal)
            yield found

    learner, loss = make(dropout=0.2)
    handler = signal.getsignal(number_of_signal)
    stopped = braintrace.fit(
        learner,
        batches,
        loss,
        optax.adam(1e-2),
        max_batches=35,
        metrics={"close": close},
        checkpoint_dir=tmp_path / "c",
        progress=False,
    )
    assert stopped.interrupted
    assert stopped.checkpoint == tmp_path / "c" / "13"
    assert signal.getsignal(number_of_signal) is handler
    assert without_time(stopped)[0] == without_time(whole)[0][:13]


def test_says_what_is_wrong(tmp_path):
    learner, loss = make()
    go = lambda data=epoch, learner=learner, step_fn=loss, **options: braintrace.fit(
        learner, data, step_fn, optax.sgd(0.1), **{"max_batches": 1, "progress": False, **options}
    )
    with pytest.raises(TypeError, match="trains a learner"):
        go(learner=Net())
    with pytest.raises(ValueError, match="'sequence' or a number"):
        go(update_every=0)
    with pytest.raises(TypeError, match="A batch is"):
        go([{"x": 1}])
    with pytest.raises(ValueError, match="gave no batch"):
        go([])
    with pytest.raises(ValueError, match="read only once"):
        go(iter([batch(0)]), epochs=2, max_batches=None)
    with pytest.raises(ValueError, match="checkpoint_dir"):
        go(resume=True)
    xs, ys, _ = batch(0, size=3)
    for data, words in (
        ((xs, ys[0, :, 0]), r"one label per sequence .* `np.broadcast_to\(ys, \(4, 3\)\)`"),
        ((xs, ys[:, 0, 0]), "xs` has the batch first"),
        ((xs, ys.swapaxes(0, 1)), "Swap the first two axes"),
        ((xs, ys, np.ones((3, 4))), "Swap the first two axes"),
        ((xs, ys, np.ones((4, 3))), "must return 3 losses, one for each sample"),
    ):
        with pytest.raises(ValueError, match=words):
            go([data], step_fn=lambda x, y: jnp.mean((learner(x) - jnp.swapaxes(y, 0, 0)) ** 2))
    go(checkpoint_dir=tmp_path)
    with pytest.raises(FileExistsError, match="resume=True"):
        go(checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="made with D_RTRL, and this learner is ES_D_RTRL"):
        go(learner=braintrace.ES_D_RTRL(learner.model), checkpoint_dir=tmp_path, resume=True)
    with pytest.raises(TypeError, match="one of optax"):
        braintrace.fit(learner, epoch, loss, 0.1)
    wide, _ = make(units=7)
    with pytest.raises(
        ValueError, match=r"does not fit the model: `optimizer`|does not fit the model: `state"
    ):
        braintrace.fit(
            wide,
            epoch,
            lambda x, y: jnp.mean((wide(x) - y) ** 2),
            optax.sgd(0.1),
            max_batches=2,
            checkpoint_dir=tmp_path,
            resume=True,
            progress=False,
        )
    with pytest.warns(UserWarning, match="batches of 4 sequences, and `batches` now gives 3"):
        go([batch(0, size=3)] * 2, checkpoint_dir=tmp_path, resume=True, max_batches=2)


def damage(folder):
    """Cut every file of a checkpoint short, as a full disk does."""
    for file in filter(Path.is_file, folder.rglob("*")):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_resuming_from_a_damaged_checkpoint(tmp_path):
    def go(number, **options):
        learner, loss = make()
        options = {"checkpoint_dir": tmp_path, "checkpoint_every": 2, "progress": False, **options}
        braintrace.fit(learner, epoch, loss, optax.adam(1e-2), max_batches=number, resume=True, **options)
        return parameters(learner)

    whole = go(7, checkpoint_dir=tmp_path / "whole")
    go(6)
    damage(tmp_path / "6")
    shutil.rmtree(tmp_path / "4" / "notes")
    with pytest.warns(UserWarning, match="Damaged, and set aside") as caught:
        found = go(7)
    same(whole, found)
    (message,) = [str(w.message) for w in caught]
    for word in (str(tmp_path / "6"), str(tmp_path / "4"), f"goes on from {tmp_path / '2'}"):
        assert word in message
    assert [w.filename for w in caught] == [__file__]
    names = sorted(p.name for p in tmp_path.iterdir() if p.name != "whole")
    assert names == ["4", "6", "7", "damaged-4", "damaged-6"]
    with pytest.warns(UserWarning, match="`update_every` was sequence and is 1"):
        go(8, update_every=1)
    for folder in tmp_path.glob("[0-9]*"):
        damage(folder)
    with pytest.raises(ValueError, match=r"No checkpoint in .* can be read: .*start afresh"):
        go(9)


def test_rows_survive_columns():
    kept = [{"batch": 1, "epoch": 0, "loss": 0.5}, {"batch": 2, "epoch": 0, "loss": 0.25, "extra": 1.0}]
    assert to_rows(to_columns(kept)) == kept
