"""Learn from a stream that never ends, with dependencies longer than any window that fits in memory.

A cue appears among random symbols. Several hundred steps later, at a time that cannot be foreseen, a marker
asks for it. The net updates its weights every ten steps and keeps nothing but its state and eligibility
traces, so that memory stays constant. Truncated BPTT with the same memory sees a few steps at a time and
stays at chance; BPTT over the whole stream would need memory that grows with it.

A second comparison turns the dial between memory and quality: a GRU, whose recurrent weights make one-step
traces approximate, with corrections of rank 0, 2 and 8, next to truncated BPTT with growing windows.

    python examples/demo.py [--steps 150000] [--out runs/demo] [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

import braintrace

SYMBOLS, STREAMS, UNITS, EVERY = 4, 8, 32, 10  # an update every 10 steps
INPUTS = SYMBOLS + 2  # symbols, and flags that mark the cue and the recall
ROUNDS = 20  # points of a curve
say = Console(highlight=False).print


# -- the stream ---------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """The state of one stream."""

    key: Any
    left: Any  # steps until the recall
    cue: Any


def read_stream(trial: Trial, delays: tuple[int, int], length: int) -> tuple[Trial, Any]:
    """Return the state of a stream after `length` steps, and its inputs, answers and mask."""

    def step(trial: Trial, _: None) -> tuple[Trial, Any]:
        key, key_symbol, key_delay = jax.random.split(trial.key, 3)
        symbol = jax.random.randint(key_symbol, (), 0, SYMBOLS)
        begins = trial.left == 0
        cue = jnp.where(begins, symbol, trial.cue)
        delay = jax.random.randint(key_delay, (), delays[0], delays[1] + 1)
        left = jnp.where(begins, delay, trial.left - 1)
        flags = jnp.stack([begins, left == 0]).astype(float)
        x = jnp.concatenate([jax.nn.one_hot(symbol, SYMBOLS), flags])
        return Trial(key, left, cue), (x, cue, flags[1])

    return jax.lax.scan(step, trial, length=length)


# -- two nets, as plain JAX functions -----------------------------------------------------------------------


def gated(params: Any, h: Any, x: Any) -> Any:
    """A gate that reads the input decides what is stored: diagonal traces are exact."""
    z, new = jnp.split(x @ params["w"] + params["b"], 2, axis=-1)
    h = h + jax.nn.sigmoid(z) * (jnp.tanh(new) - h)
    return h, h @ params["out"]


def gru(params: Any, h: Any, x: Any) -> Any:
    """A gated recurrent unit: its recurrent weights couple all units."""
    both = jnp.concatenate([x, h], -1)
    z = jax.nn.sigmoid(both @ params["wz"] + params["bz"])
    r = jax.nn.sigmoid(both @ params["wr"])
    h = h + z * (jnp.tanh(jnp.concatenate([x, r * h], -1) @ params["wh"]) - h)
    return h, h @ params["out"]


def draw_gated(key: Any) -> Any:
    keys = jax.random.split(key)
    b = jnp.concatenate([jnp.full(UNITS, -4.0), jnp.zeros(UNITS)])  # gates are nearly shut at first
    w = 0.5 * jax.random.normal(keys[0], (INPUTS, 2 * UNITS))
    return {"w": w, "b": b, "out": jax.random.normal(keys[1], (UNITS, SYMBOLS)) / UNITS**0.5}


def draw_gru(key: Any) -> Any:
    size, keys = INPUTS + UNITS, jax.random.split(key, 4)
    drawn = {
        name: jax.random.normal(k, (size, UNITS)) / size**0.5
        for name, k in zip(("wz", "wr", "wh"), keys, strict=False)
    }
    out = jax.random.normal(keys[3], (UNITS, SYMBOLS)) / UNITS**0.5
    return {**drawn, "bz": jnp.full(UNITS, -2.0), "out": out}


# -- learning -----------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A curve and the memory of a learner."""

    steps: np.ndarray
    accuracy: np.ndarray
    memory: float  # in bytes
    seconds: float


class Learner:
    """A rule that learns from the stream, with one update after every `length` steps."""

    def __init__(
        self, step: Any, params: Any, delays: tuple[int, int], length: int, rate: float, **options: Any
    ) -> None:
        h = jnp.zeros((STREAMS, UNITS))
        self.net = braintrace.online(step, params, h, jnp.zeros((STREAMS, INPUTS)), **options)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
        self.delays, self.length = delays, length
        keys = jax.random.split(jax.random.key(1), STREAMS)
        trials = jax.vmap(lambda key: Trial(key, jnp.zeros((), int), jnp.zeros((), int)))(keys)
        self.start = (params, self.optimizer.init(params), h, self.net.init(params, h), trials)

    def update(self, state: Any) -> tuple[Any, Any]:
        """Read some steps of the stream, and change the weights if they asked for a cue."""
        params, opt_state, h, traces, trials = state
        read = jax.vmap(lambda trial: read_stream(trial, self.delays, self.length))
        trials, (xs, cues, asked) = read(trials)
        xs, cues, asked = (jnp.swapaxes(a, 0, 1) for a in (xs, cues, asked))

        def loss(y: Any, cue: Any, asked: Any) -> Any:
            each = optax.softmax_cross_entropy_with_integer_labels(y, cue)
            return jnp.sum(asked * each), jnp.sum(asked * (jnp.argmax(y, -1) == cue))

        grads, (h, traces), (_, right) = self.net.grad(
            loss, params, h, traces, xs, cues, asked, reduction="sum", has_aux=True
        )
        changes, new_opt_state = self.optimizer.update(grads, opt_state, params)
        keep = lambda new, old: jnp.where(jnp.sum(asked) > 0, new, old)
        params = jax.tree.map(lambda old, change: keep(old + change, old), params, changes)
        opt_state = jax.tree.map(keep, new_opt_state, opt_state)
        return (params, opt_state, h, traces, trials), (jnp.sum(right), jnp.sum(asked))

    def memory(self) -> float:
        """Return the bytes of states, traces and intermediate values of one update, as XLA reports them."""
        _, _, h, traces, _ = self.start
        found = jax.jit(self.update).lower(self.start).compile().memory_analysis()
        return found.temp_size_in_bytes + sum(a.nbytes for a in jax.tree.leaves((h, traces)))

    def run(self, steps: int, name: str) -> Run:
        """Learn for so many steps of the stream."""
        count = max(1, steps // ROUNDS // self.length)
        rounds = jax.jit(lambda state: jax.lax.scan(lambda s, _: self.update(s), state, length=count))
        state, scores, began = self.start, [], time.monotonic()
        for done in range(1, ROUNDS + 1):
            state, (right, asked) = rounds(state)
            scores.append(float(jnp.sum(right) / jnp.maximum(jnp.sum(asked), 1)))
            if done % 5 == 0:
                say(f"  {name:34} step {done * count * self.length:9,}   accuracy {scores[-1]:.2f}")
        at = np.arange(1, ROUNDS + 1) * count * self.length
        return Run(at, np.array(scores), self.memory(), time.monotonic() - began)


# -- the page -----------------------------------------------------------------------------------------------


def draw(
    out: Path, ours: Run, truncated: Run, window: int, per_step: float, dial: dict[str, list[Any]]
) -> None:
    """Draw accuracy and memory over stream time, and the dial."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
    with matplotlib.rc_context(style):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
        blue, black, orange = "#0072B2", "#000000", "#D55E00"
        left.plot(ours.steps, ours.accuracy, color=blue, marker="o", ms=3, label="online, exact traces")
        name = f"truncated BPTT, {window} steps"
        left.plot(truncated.steps, truncated.accuracy, color=orange, marker="s", ms=3, label=name)
        left.axhline(1 / SYMBOLS, color="#999999", ls=":", label="chance")
        left.set(title="Accuracy at recall", xlabel="steps of the stream", ylim=(0, 1.05))
        left.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k")
        left.legend(loc="center right", frameon=False)

        kib = 1 / 2**10
        end = ours.steps[-1]
        t = np.geomspace(1, end, 100)
        middle.plot(t, 0 * t + kib * ours.memory, color=blue, lw=2, label="online, exact traces")
        middle.plot(t, 0 * t + kib * truncated.memory, color=orange, ls="--", lw=2, label=name)
        middle.plot(t, kib * per_step * t, color=black, label="BPTT over the whole stream")
        middle.set(
            title="Memory of an update (KiB)", xlabel="steps of the stream", xscale="log", yscale="log"
        )
        middle.annotate(
            f"{per_step * end / 2**30:.1f} GiB",
            (end, kib * per_step * end),
            (-58, -4),
            textcoords="offset points",
        )
        middle.legend(loc="upper left", frameon=False)

        dial_steps = next(iter(dial.values()))[0][1].steps[-1]
        for name, points in dial.items():
            # labels of truncated BPTT are above its points, because chance is below
            color, marker, above = (orange, "s", 9) if "BPTT" in name else (blue, "o", -16)
            memories = [kib * run.memory for _, run in points]
            scores = [run.accuracy.mean() for _, run in points]
            right.plot(memories, scores, color=color, marker=marker, label=name)
            place = {"xytext": (0, above), "textcoords": "offset points", "ha": "center", "fontsize": 9}
            for (label, _), x, y in zip(points, memories, scores, strict=True):
                right.annotate(label, (x, y), **place)
        right.axhline(1 / SYMBOLS, color="#999999", ls=":")
        right.set(
            title=f"The dial: mean accuracy of a GRU in {dial_steps:,} steps",
            xlabel="memory of an update (KiB)",
        )
        right.set(xscale="log", ylim=(0, 1.05))
        right.margins(x=0.15)
        right.legend(loc="upper left", frameon=False)
        for path in (out / "demo.png", out / "demo.svg"):
            figure.savefig(path, dpi=130)
        plt.close(figure)


def late(run: Run) -> float:
    """Return the accuracy over the second half of a run."""
    return float(run.accuracy[ROUNDS // 2 :].mean())


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Learning from a stream</title>
<style>body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; }}
svg {{ width: 100%; height: auto; }} td, th {{ padding: .2em 1.5em .2em 0; text-align: left; }}</style>
<h1>Learning from a stream that never ends</h1><p>{text}</p>{svg}<table>{rows}</table>
<p>All numbers were computed in this run, in {seconds:.0f} seconds on {device}.</p></html>"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150_000, help="length of the stream")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument(
        "--quick", action="store_true", help="a few steps, without a check of what is learned"
    )
    given = parser.parse_args()
    began = time.monotonic()
    steps, delays = (2000, (20, 40)) if given.quick else (given.steps, (200, 400))
    text = (
        f"One of {SYMBOLS} symbols is marked as the cue. After {delays[0]} to {delays[1]} steps of random "
        f"symbols, a marker asks for it. {STREAMS} streams run in parallel, without end and without resets."
    )
    say(f"[bold]The stream.[/] {text}\n")

    params = draw_gated(jax.random.key(0))
    make = lambda length, **options: Learner(gated, params, delays, length, 5e-3, **options)
    online = make(EVERY, rule="d_rtrl")
    ours = online.run(steps, "online, exact traces")
    bptt = lambda length: make(length, rule="bptt")
    per_step = (bptt(1000).memory() - bptt(10).memory()) / 990
    window = max(1, int(10 + (ours.memory - bptt(10).memory()) / per_step))
    truncated = bptt(window).run(steps, f"truncated BPTT, windows of {window}")

    say("\n[bold]The dial.[/] A GRU on the first steps of a stream with delays of 20 to 40 steps.")
    short, weights = (500 if given.quick else 15_000), draw_gru(jax.random.key(0))
    turn = lambda length, **options: Learner(gru, weights, (20, 40), length, 3e-3, **options)
    dial: dict[str, list[Any]] = {"online, windows of 5": [], "truncated BPTT": []}
    for rank in (0, 2, 8)[: 1 if given.quick else 3]:
        run = turn(5, rule=braintrace.rules.D_RTRL(rank=rank), window=5).run(short, f"rank {rank}")
        dial["online, windows of 5"].append((f"rank {rank}", run))
    for length in (5, 20, 80)[: 1 if given.quick else 3]:
        run = turn(length, rule="bptt").run(short, f"truncated BPTT, windows of {length}")
        dial["truncated BPTT"].append((f"{length} steps", run))

    given.out.mkdir(parents=True, exist_ok=True)
    draw(given.out, ours, truncated, window, per_step, dial)
    kib = lambda size: f"{size / 2**10:,.0f} KiB"
    table = [
        ("learner", "accuracy", "memory", "time"),
        ("online, exact traces", f"{late(ours):.3f}", kib(ours.memory), f"{ours.seconds:.0f} s"),
        (
            f"truncated BPTT, {window} steps",
            f"{late(truncated):.3f}",
            kib(truncated.memory),
            f"{truncated.seconds:.0f} s",
        ),
        ("BPTT over the whole stream", "not run", f"{per_step * ours.steps[-1] / 2**30:.1f} GiB", ""),
    ]
    say("")
    for row in table:
        say(f"{row[0]:28}{row[1]:>10}{row[2]:>12}{row[3]:>8}")
    rows = "".join(
        "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(["th", "td", "td", "td"], table, strict=True)
    )
    svg = (given.out / "demo.svg").read_text()
    seconds, device = time.monotonic() - began, jax.devices()[0].device_kind
    page = given.out / "demo.html"
    page.write_text(
        PAGE.format(text=text, svg=svg[svg.index("<svg") :], rows=rows, seconds=seconds, device=device)
    )
    say(f"\n{seconds:.0f} s. Open [bold]{page}[/] in a browser; it needs no network.")
    return 0 if given.quick or (late(ours) > 0.9 and late(truncated) < 1 / SYMBOLS + 0.1) else 1


if __name__ == "__main__":
    sys.exit(main())
