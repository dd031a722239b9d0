"""Weak scaling, read from compiled programs: what each of 1, 2, 4 and 8 devices holds, computes and sends.

A GRU learns by D_RTRL in chunks, or by BPTT to compare. Batches are spread over the devices, so many
sequences on each; or the batch is as it is and the columns of the weights are spread. Bytes are XLA's buffer
assignment for one device, operations XLA's count for one device with the body of a loop counted once, and
what is sent is the sum of the sizes of what collectives return, each as often as it is run. All of it is
known before anything runs, so that eight devices of a CPU do. The time on GPUs is predicted from that of one,
and from what the sums of gradients need between them.

    python benchmarks/scaling.py            writes benchmarks/results/scaling.md
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import braintrace  # noqa: E402

IN, UNITS, EACH, LENGTH, CHUNK = 32, 128, 4, 8, 4
COUNTS = (1, 2, 4, 8)
PREDICTED = "rule | one device, ms | sums | eight, ms | efficiency | one sum: ms, efficiency"
OUT = Path(__file__).parent / "results" / "scaling.md"

# seconds on one H200: GRU 256 -> 1024, 64 sequences of 200 steps
ON_ONE = {"BPTT": 17.7e-3, "D_RTRL in chunks": 0.85 * 17.7e-3}
BIG_IN, BIG_UNITS, BIG_LENGTH, BIG_CHUNK = 256, 1024, 200, 20
LINK = 450e9  # bytes a second that an H200 sends to others in its machine, by its data sheet
REACHED = 0.7  # the part of it that a sum over devices is taken to reach
START = 30e-6  # seconds until a sum over devices begins, taken to be


def gru(params: Any, h: Any, x: Any) -> Any:
    xh = jnp.concatenate([x, h], -1)
    z = jax.nn.sigmoid(xh @ params["z"] + params["bz"])
    r = jax.nn.sigmoid(xh @ params["r"] + params["br"])
    new = jnp.tanh(jnp.concatenate([x, r * h], -1) @ params["h"] + params["bh"])
    h = (1 - z) * h + z * new
    return h, h


def weights(inputs: int, units: int) -> dict[str, tuple[int, ...]]:
    return {
        **dict.fromkeys(("z", "r", "h"), (inputs + units, units)),
        **dict.fromkeys(("bz", "br", "bh"), (units,)),
    }


def squared(h: Any, y: Any) -> Any:
    return jnp.mean((h.mean(-1) - y) ** 2)


@dataclass
class Costs:
    """Of one device."""

    traces: int
    temporary: int
    operations: float
    sent: int
    kinds: Counter[str]  # collectives, and how often they are run

    @property
    def sums(self) -> int:
        return self.kinds["all-reduce"]


def costs(rule: str, shape: tuple[int, int], batch: int) -> Costs:
    """Of the gradients of a batch of sequences, on a mesh of (data, model)."""
    mesh = jax.make_mesh(
        shape,
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: int(np.prod(shape))],
    )
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / 10
    params = {k: put(draw(*s), *[None] * (len(s) - 1), "model") for k, s in weights(IN, UNITS).items()}
    carry = put(draw(batch, UNITS), "data", "model")
    xs = put(draw(LENGTH, batch, IN), None, "data")
    ys = put(draw(LENGTH, batch), None, "data")
    chosen = braintrace.rules.BPTT() if rule == "BPTT" else braintrace.rules.D_RTRL()
    net = braintrace.online(gru, params, carry, xs[0], rule=chosen)
    traces = net.init(params, carry)
    grad = jax.jit(
        lambda *given: net.grad(squared, *given, chunk_size=None if rule == "BPTT" else CHUNK),
    )
    compiled = grad.lower(params, carry, traces, xs, ys).compile()
    found = compiled.cost_analysis()
    sent, kinds = collectives(compiled.as_text())
    return Costs(
        traces=sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(traces)),
        temporary=compiled.memory_analysis().temp_size_in_bytes,
        operations=(found[0] if isinstance(found, list) else found)["flops"],
        sent=sent,
        kinds=kinds,
    )


def collectives(text: str) -> tuple[int, Counter[str]]:
    """The bytes that the collectives of a program return in all, and how often each kind is run."""
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    total, kinds = 0, Counter[str]()
    times = runs(text)
    for name, body in computations(text).items():
        for line in re.findall(rf"= (.*?) ({names})(?:-start)?\(", body):
            for _, width, sizes in re.findall(r"\b([a-z]+)(\d+)\[([\d,]*)\]", line[0]):
                size = int(np.prod([int(n) for n in sizes.split(",") if n], dtype=int))
                total += times[name] * int(width) // 8 * size
            kinds[line[1]] += times[name]
    return total, kinds


def computations(text: str) -> dict[str, str]:
    """The parts of a program, by name."""
    found = re.findall(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    return dict(found)


def runs(text: str) -> dict[str, int]:
    """How often each part of a program is run."""
    parts = computations(text)
    times = dict.fromkeys(parts, 0)

    def visit(name: str, number: int) -> None:
        times[name] += number
        for line in parts[name].splitlines():
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            if " while(" in line and trips is None:
                raise ValueError(f"It is not known how often a loop runs: {line.strip()[:200]}")
            for called in re.findall(r"(?:body|calls|to_apply)=%?([\w.\-]+)", line):
                visit(called, number * (int(trips[1]) if trips and " while(" in line else 1))

    visit(re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)[1], 1)  # type: ignore[index]
    return times


def table(rows: list[tuple[Any, ...]], head: str) -> str:
    names = head.split(" | ")
    lines = [names, ["---"] + ["---:"] * (len(names) - 2) + ["---"], *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in lines)


def row(name: str, c: Costs) -> tuple[Any, ...]:
    kib = lambda n: f"{n / 1024:,.1f}"
    by = ", ".join(f"{n} {kind}" for kind, n in c.kinds.items()) or "none"
    return name, kib(c.traces), kib(c.temporary), f"{c.operations:,.0f}", kib(c.sent), by


def predicted(devices: int, gradients: int, sums: dict[str, tuple[int, float]]) -> list[tuple[Any, ...]]:
    """Milliseconds on one device and on several, with so many sums over devices of so many bytes."""
    rows = []
    for name, one in ON_ONE.items():
        number, size = sums[name]
        each = 2 * (devices - 1) / devices * size / (LINK * REACHED) + START  # by a ring
        whole = 2 * (devices - 1) / devices * gradients / (LINK * REACHED) + START
        times = one + number * each, one + whole
        rows.append(
            (
                name,
                f"{one * 1e3:.1f}",
                f"{number} of {size / 2**20:.1f} MiB",
                f"{times[0] * 1e3:.1f}",
                f"{one / times[0]:.0%}",
                f"{times[1] * 1e3:.1f}, {one / times[1]:.0%}",
            )
        )
    return rows


def main() -> None:
    head = "devices | traces, KiB | temporary, KiB | operations | sent, KiB | by"
    data = {n: costs("D_RTRL", (n, 1), EACH * n) for n in COUNTS}
    through = {n: costs("BPTT", (n, 1), EACH * n) for n in (1, 8)}
    model = {n: costs("D_RTRL", (1, n), EACH * 8) for n in COUNTS}
    both = costs("D_RTRL", (4, 2), EACH * 8)
    model_through = {shape: costs("BPTT", shape, EACH * 8) for shape in ((1, 8), (4, 2))}
    larger = {k: costs("D_RTRL", (8, 1), EACH * 8 * k) for k in (1, 2, 4)}

    traces = [c.traces for c in data.values()]
    sent = {c.sent for c in [*larger.values(), *(data[n] for n in COUNTS[1:])]}
    same = lambda holds: "holds" if holds else "DOES NOT HOLD"
    spread = max(traces) / min(traces) - 1
    work = max(data[n].operations for n in COUNTS[1:]) / data[1].operations - 1
    parameters, big = (
        4 * sum(int(np.prod(s)) for s in weights(*sizes).values())
        for sizes in ((IN, UNITS), (BIG_IN, BIG_UNITS))
    )
    # as the small net: BPTT in every step, D_RTRL in every chunk
    each = {"BPTT": (through[8], BIG_LENGTH / LENGTH)}
    each["D_RTRL in chunks"] = data[8], BIG_LENGTH / BIG_CHUNK / (LENGTH / CHUNK)
    sums = {k: (round(c.sums * times), big * c.sent / c.sums / parameters) for k, (c, times) in each.items()}
    link, begin = f"{REACHED:.0%} of {LINK / 1e9:.0f} GB/s", f"{START * 1e6:.0f} µs"
    text = f"""# Many devices: what each holds, computes and sends

{__doc__.split(chr(10) * 2)[1]}

GRU {IN}->{UNITS}, float32, {LENGTH} steps in chunks of {CHUNK}; its parameters are {
        parameters / 1024:,.1f} KiB.
jax {jax.__version__}.

## What must hold

| | limit | measured | |
|---|---|---:|---|
| traces of a device, 1 to 8 devices, {EACH} sequences on each | equal within 2 % | {spread:.1%} | {
        same(spread <= 0.02)
    } |
| operations of a device, of 2 to 8 beside 1 | within 2 % | {work:+.1%} | {same(abs(work) <= 0.02)} |
| bytes sent, 2 to 8 devices, traces of 1, 2 and 4 times the size | one number | \
{", ".join(f"{s / 1024:,.1f} KiB" for s in sorted(sent))} | {same(len(sent) == 1)} |

## Batches over devices, {EACH} sequences on each

{table([row(str(n), c) for n, c in data.items()], head)}

The same by BPTT:

{table([row(str(n), c) for n, c in through.items()], head)}

More sequences on each of 8 devices: traces grow, what is sent does not.

{table([row(f"8, {EACH * k} on each", c) for k, c in larger.items()], head)}

## Columns of weights over devices, {EACH * 8} sequences

By BPTT, below it, is what the model's own forward and backward pass send.

{
        table(
            [
                *(row(str(n), c) for n, c in model.items()),
                row("4 x 2: batches over 4", both),
                row("8, BPTT", model_through[1, 8]),
                row("4 x 2, BPTT", model_through[4, 2]),
            ],
            head,
        )
    }

## Predicted time on 8 H200

GRU {BIG_IN}->{BIG_UNITS}, 64 sequences of {BIG_LENGTH} steps on each device, in chunks of {
        BIG_CHUNK
    }. The time
of one device is measured; a device of eight computes and holds the same (above), and beside it takes part in
sums of gradients: as many and as large as the programs above have them, by a ring at {link}, each
after {begin}, and without overlap. The last column has a single sum, at the end of the sequence, as
where XLA moves sums out of loops.

{table(predicted(8, big, sums), PREDICTED)}
"""
    OUT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
