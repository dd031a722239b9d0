"""`fit` on streams: the updates of a loop by hand, resets, averages, and streams that break."""

from __future__ import annotations

import itertools
import signal

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace._train.progress_bar import Watch
from braintrace._train.result import FitResult

from .nets import BATCH, IN, OUT, make

pytestmark = pytest.mark.slow
STEPS, BLOCK = 24, 8


def step_of(number, size=BATCH):
    """One step `(x, y, mask, reset)`, which depends on its number alone."""
    rng = np.random.default_rng(number)
    x = rng.normal(size=(size, IN)).astype(np.float32)
    mask = np.float32(number % 5 != 2)
    return x, np.tanh(x[:, :OUT]), mask, rng.random(size) < 0.1


def steps(start=0):
    return map(step_of, itertools.count(start))


def parameters(learner):
    return {".".join(k): st.value for k, st in learner.param_states.items()}


def same(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def without_time(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def run(source=steps, made=None, block=BLOCK, optimizer=None, average=100.0, **options):
    learner, loss = made or make()
    options = {"max_steps": STEPS, "progress": False, **options}
    stream = braintrace.Stream(source, block, average)
    result = braintrace.fit(learner, stream, loss, optimizer or optax.adam(1e-2), **options)
    return learner, result


def by_hand():
    """The same updates in a plain loop: parameters, and the loss of each step."""
    learner, loss = make()
    brainstate.nn.init_all_states(learner.model, batch_size=BATCH)
    learner.compile_graph(jnp.zeros((BATCH, IN)))
    weights, optimizer = learner.param_states, optax.adam(1e-2)
    value = lambda: {k: st.value for k, st in weights.items()}
    opt_state, losses = optimizer.init(value()), []

    @brainstate.transform.jit
    def gradient(x, y, reset):
        learner.reset_state(rows=reset)
        return brainstate.transform.grad(lambda: loss(x, y)[0], weights, return_value=True)()

    for x, y, mask, reset in itertools.islice(steps(), STEPS):
        grads, found = gradient(x, y, reset)
        losses.append((float(found), float(mask)))
        if mask:
            updates, opt_state = optimizer.update(dict(grads), opt_state)
            for key, new in optax.apply_updates(value(), updates).items():
                weights[key].value = new
    return parameters(learner), losses


def test_equals_a_loop_by_hand():
    learner, result = run()
    expected, losses = by_hand()
    same(parameters(learner), expected, rtol=1e-4, atol=1e-6)
    assert [(r["batch"], r["step"]) for r in result.history] == [(1, 8), (2, 16), (3, 24)]
    for number, row in enumerate(result.history):
        part = losses[number * BLOCK : (number + 1) * BLOCK]
        expected = sum(v * m for v, m in part) / sum(m for _, m in part)
        assert row["loss"] == pytest.approx(expected, rel=1e-4)
    assert result.steps_per_second > 0


def in_blocks(sizes):
    source = steps()
    for size in sizes:
        yield jax.tree.map(lambda *leaves: np.stack(leaves), *itertools.islice(source, size))


def test_blocks_change_no_number():
    learner, result = run()
    for source, block in ((steps, 5), (steps(), STEPS), (in_blocks([10, 10, 10]), None)):
        other, found = run(source, block=block)
        same(parameters(other), parameters(learner), rtol=1e-5, atol=1e-7)
        assert found.history[-1]["step"] == STEPS  # the last block is cut
    assert result.history[-1]["batch"] == 3


@pytest.mark.parametrize("options", [{"update_every": 4}, {"update_every": 4, "window": 2, "rank": 1}])
def test_resets_begin_anew(options):
    """With a reset of all samples at a step, what follows equals a run that starts there."""
    flags = lambda number: np.full(BATCH, number in (0, 8))
    marked = lambda start: ((*step_of(i)[:3], flags(i)) for i in itertools.count(start))
    shifted = lambda start: ((*step_of(i)[:3], flags(i)) for i in itertools.count(start + 8))
    frozen = optax.sgd(0.0)
    _, whole = run(marked, optimizer=frozen, **options)
    _, part = run(shifted, optimizer=frozen, max_steps=8, **options)
    assert whole.history[1]["loss"] == pytest.approx(part.history[0]["loss"], rel=1e-5)
    _, without = run(lambda start: ((*s[:3],) for s in steps(start)), optimizer=frozen, **options)
    assert whole.history[1]["loss"] != pytest.approx(without.history[1]["loss"], rel=1e-5)


def test_a_stream_without_a_batch_axis():
    batch_of_one = lambda start: (step_of(i, 1) for i in itertools.count(start))
    single = lambda start: ((x[0], y[0], mask, reset[0]) for x, y, mask, reset in batch_of_one(start))
    a, _ = run(single, batched=False)
    b, _ = run(batch_of_one)
    same(parameters(a), parameters(b), rtol=1e-5, atol=1e-7)


def test_averages_and_stopping():
    _, result = run(eval_every=1, average=10.0)
    assert [r["step"] for r in result.evaluations] == [8, 16, 24]
    total = weight = 0.0
    for row, found in zip(result.history, result.evaluations, strict=True):
        counted = sum(float(step_of(i)[2]) for i in range(row["step"] - BLOCK, row["step"]))
        total = np.exp(-BLOCK / 10) * total + counted * row["loss"]
        weight = np.exp(-BLOCK / 10) * weight + counted
        assert found["loss"] == pytest.approx(total / weight)
    assert result.metrics == {"loss": result.evaluations[-1]["loss"]}
    _, stopped = run(eval_every=1, max_steps=None, stop_when=lambda row: row["step"] >= 2 * BLOCK)
    assert stopped.reached
    assert stopped.history[-1]["step"] == 2 * BLOCK


@pytest.mark.parametrize("resumable", [True, False])
def test_a_stopped_stream_goes_on_bit_for_bit(resumable, tmp_path):
    """By SIGTERM; the source is a function of the step, or is read again from its start."""
    options = {"eval_every": 2, "metrics_file": tmp_path / "metrics.jsonl"}
    learner, whole = run(max_steps=40, **options)

    def stopping(start):
        for number in itertools.count(start):
            if number == 11:
                signal.raise_signal(signal.SIGTERM)
            yield step_of(number)

    options["checkpoint_dir"] = tmp_path / "c"
    _, first = run(stopping, max_steps=40, **options)
    assert first.interrupted
    assert first.history[-1]["step"] == 16
    again, rest = run(steps if resumable else steps(), max_steps=40, resume=True, **options)
    assert without_time(rest.history) == without_time(whole.history)
    assert without_time(rest.evaluations) == without_time(whole.evaluations)
    same(parameters(again), parameters(learner), rtol=0)


def test_a_stream_that_ends_early(tmp_path):
    short = lambda start: itertools.islice(steps(start), 20 - start)
    with pytest.raises(ValueError, match=r"ended after 20 steps, before `max_steps=24`.*checkpoint is .*c/3"):
        run(short, checkpoint_dir=tmp_path / "c")
    learner, result = run(checkpoint_dir=tmp_path / "c", resume=True)
    assert [r["step"] for r in result.history] == [8, 16, 20, 24]
    whole, _ = run()
    same(parameters(learner), parameters(whole), rtol=1e-5, atol=1e-7)
    _, result = run(short, max_steps=None)
    assert result.history[-1]["step"] == 20
    with pytest.raises(ValueError, match="ended after 0 steps"):
        run(())


def broken(number, **changes):
    """A stream whose steps from this number on are changed."""

    def source(start):
        for i in itertools.count(start):
            entries = dict(zip(("x", "y", "mask", "reset"), step_of(i), strict=True))
            yield tuple((entries | (changes if i >= number else {})).values())

    return source


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reset": np.zeros(BATCH + 1, bool)}, r"`reset` has a boolean .* \(time, batch\) = \(8, 4\)"),
        ({"reset": np.zeros(BATCH)}, r"these flags are float64\[8, 4\]"),
        ({"reset": np.zeros((), bool)}, r"bool\[8\]"),
        ({"x": np.full((BATCH, IN), np.nan, np.float32)}, r"`xs` of this batch has nan at \[0, 0, 0\]"),
        ({"y": np.full((BATCH, OUT), np.inf, np.float32)}, r"`ys` of this batch has inf at \[0, 0, 0\]"),
    ],
)
def test_broken_streams_keep_the_last_checkpoint(changes, words, tmp_path):
    made = make()
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    with pytest.raises((ValueError, braintrace.DivergedError), match=words):
        run(broken(2 * BLOCK, **changes), made, **options)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(parameters(made[0])))
    learner, result = run(resume=True, **options)
    assert result.history[-1]["step"] == STEPS
    whole, _ = run()
    same(parameters(learner), parameters(whole), rtol=0)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        (3, {}, "A stream is an iterable"),
        (steps, {"epochs": 2}, "no epochs"),
        (steps, {"update_every": "sequence"}, "`update_every` is a number of steps"),
        (itertools.repeat(3), {}, "all steps alike"),
        (itertools.cycle([step_of(0), step_of(0, 2)]), {}, "differ in their shapes"),
        (steps, {"block": 0}, "at least 1"),
        (steps, {"max_steps": 0}, "at least 1"),
    ],
)
def test_says_what_is_wrong(source, options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        run(source, **options)


def test_memory_is_flat():
    """After the first blocks no array is left over, and no program is compiled."""
    counts, traced = [], []
    learner, loss = make()

    def source(start):
        for number in itertools.count(start):
            if number % 50 == 0:
                counts.append((len(jax.live_arrays()), len(traced)))
            yield step_of(number)

    def counted(x, y):
        traced.append(1)
        return loss(x, y)

    run(source, (learner, counted), block=50, max_steps=2000)
    assert len(counts) == 40
    assert len({*counts[3:]}) == 1


def test_a_live_curve(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    result = FitResult(
        [{"batch": i, "epoch": 0, "step": i, "loss": 1 / i, "seconds": 0.1} for i in (1, 2, 3)]
    )
    with Watch(3, True, result) as watch:
        watch.trained(result.history[-1], 8, 0.1)
        assert "loss" in watch._bar.drawing.plain
        assert any(0x2800 < ord(c) < 0x2900 for c in watch._bar.drawing.plain)  # Braille dots
