"""Weak scaling, read from compiled programs: what each of 1, 2, 4 and 8 devices holds, computes and sends.

A GRU learns by D_RTRL in chunks, or by BPTT to compare. Batches are spread over the devices, so many
sequences on each; or the batch is as it is and the columns of the weights are spread. Bytes are XLA's buffer
assignment for one device, operations XLA's count for one device with the body of a loop counted once, and
what is sent is the sum of the sizes of what collectives return, each as often as it is run. All of it is
known before anything runs: eight devices of a CPU do, and a machine with one GPU compiles for eight of them.

    python benchmarks/scaling.py            writes benchmarks/results/scaling.md
    python benchmarks/scaling.py --gpu F    times on a GPU, and programs for eight; writes F, which scaling.md
                                            is made of if it is results/h200/scaling.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import braintrace  # noqa: E402
from braintrace import rules  # noqa: E402
from braintrace._report.collectives import collectives  # noqa: E402

COUNTS = (1, 2, 4, 8)
RESULTS = Path(__file__).parent / "results"
OUT, ON_GPU = RESULTS / "scaling.md", RESULTS / "h200" / "scaling.json"

LINK = 450e9  # bytes a second that an H200 sends to others in its machine, by its data sheet
REACHED = 0.7  # the part of it that a collective is taken to reach
START = 30e-6  # seconds until a collective begins, taken to be


@dataclass(frozen=True)
class Net:
    """A GRU, and the sequences that it learns from."""

    inputs: int
    units: int
    each: int  # sequences on each device
    length: int
    chunk: int

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        return {
            **dict.fromkeys(("z", "r", "h"), (self.inputs + self.units, self.units)),
            **dict.fromkeys(("bz", "br", "bh"), (self.units,)),
        }

    @property
    def bytes(self) -> int:
        return 4 * sum(int(np.prod(s)) for s in self.weights.values())

    def __str__(self) -> str:
        return f"GRU {self.inputs}->{self.units}, float32, {self.length} steps in chunks of {self.chunk}"


SMALL, BIG = Net(32, 128, 4, 8, 4), Net(256, 1024, 64, 200, 20)


def methods(net: Net) -> dict[str, tuple[Any, int | None, int | None]]:
    """Rules, with windows and chunks of so many steps."""
    return {
        "BPTT": (rules.BPTT(), None, None),
        "D_RTRL in chunks": (rules.D_RTRL(), None, net.chunk),
        "D_RTRL in steps": (rules.D_RTRL(), None, 1),
        "D_RTRL in windows": (rules.D_RTRL(), net.chunk, None),
        "D_RTRL in windows, rank 4": (rules.D_RTRL(rank=4), net.chunk, None),
        "ES_D_RTRL in chunks": (rules.ES_D_RTRL(), None, net.chunk),
    }


def gru(params: Any, h: Any, x: Any) -> Any:
    xh = jnp.concatenate([x, h], -1)
    z = jax.nn.sigmoid(xh @ params["z"] + params["bz"])
    r = jax.nn.sigmoid(xh @ params["r"] + params["br"])
    new = jnp.tanh(jnp.concatenate([x, r * h], -1) @ params["h"] + params["bh"])
    h = (1 - z) * h + z * new
    return h, h


def squared(h: Any, y: Any) -> Any:
    return jnp.mean((h.mean(-1) - y) ** 2)


def program(method: str, net: Net, batch: int, mesh: Any = None) -> tuple[Any, tuple[Any, ...]]:
    """The gradients of a batch of sequences, jitted, and the shapes that it takes."""

    def shape(*sizes: int, over: tuple[str | None, ...] = ()) -> Any:
        sharding = None if mesh is None else NamedSharding(mesh, P(*over))
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=sharding)

    rule, window, chunk = methods(net)[method]
    params = {k: shape(*s, over=(*[None] * (len(s) - 1), "model")) for k, s in net.weights.items()}
    carry = shape(batch, net.units, over=("data", "model"))
    x0 = shape(batch, net.inputs, over=("data",))
    xs = shape(net.length, batch, net.inputs, over=(None, "data"))
    ys = shape(net.length, batch, over=(None, "data"))
    learner = braintrace.online(gru, params, carry, x0, rule=rule, **({"window": window} if window else {}))
    grad = jax.jit(lambda *given: learner.grad(squared, *given, chunk_size=chunk))
    return grad, (params, carry, learner.initial_shapes, xs, ys)


@dataclass
class Costs:
    """Of one device."""

    traces: int
    temporary: int
    operations: float
    runs: dict[str, int]  # of collectives
    bytes: dict[str, int]

    @property
    def sent(self) -> int:
        return sum(self.bytes.values())

    def seconds(self, devices: int) -> float:
        """What collectives are predicted to take, one after the other, by rings."""
        around = (devices - 1) / devices / (LINK * REACHED)
        both = {"all-reduce": 2}  # ways: a sum goes round, and its result
        return sum(
            START * runs + both.get(kind, 1) * around * self.bytes[kind] for kind, runs in self.runs.items()
        )


def costs(method: str, net: Net, shape: tuple[int, int], batch: int, devices: Any = None) -> Costs:
    """Of the gradients of a batch of sequences, on a mesh of (data, model)."""
    some = np.array((devices or jax.devices())[: int(np.prod(shape))]).reshape(shape)
    grad, given = program(method, net, batch, jax.sharding.Mesh(some, ("data", "model")))
    compiled = grad.lower(*given).compile()
    found = compiled.cost_analysis() or {"flops": 0.0}  # nobody counts those of devices that are not there
    sent = collectives(compiled.as_text())
    part = lambda a: int(np.prod(a.shape if a.sharding is None else a.sharding.shard_shape(a.shape)))
    return Costs(
        traces=sum(part(a) * a.dtype.itemsize for a in jax.tree.leaves(given[2])),
        temporary=compiled.memory_analysis().temp_size_in_bytes,
        operations=(found[0] if isinstance(found, list) else found)["flops"],
        runs=dict(sent.runs),
        bytes=dict(sent.bytes),
    )


# -- on a machine with a GPU -----------------------------------------------------------------------


def seconds_on_one(net: Net, rounds: int = 5) -> dict[str, float]:
    """The median time of a batch of sequences on the device that is there, methods in turns."""
    jitted, given = {}, {}
    rng = np.random.default_rng(0)
    draw = lambda s: jnp.asarray(rng.normal(size=s.shape).astype(np.float32) / 10)
    for name in methods(net):
        grad, shapes = program(name, net, net.each)
        params, carry, traces, xs, ys = shapes
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), traces)
        given[name] = (*jax.tree.map(draw, (params, carry)), zeros, draw(xs), draw(ys))
        jitted[name] = grad
        jax.block_until_ready(grad(*given[name]))
    times: dict[str, list[float]] = {name: [] for name in jitted}
    for _ in range(rounds):
        for name, grad in jitted.items():
            start = time.perf_counter()
            for _ in range(3):
                found = grad(*given[name])
            jax.block_until_ready(found)
            times[name].append((time.perf_counter() - start) / 3)
    return {name: statistics.median(t) for name, t in times.items()}


def on_gpu(out: Path) -> None:
    from jax.experimental.topologies import get_topology_desc

    kind, found = jax.devices()[0], {}
    eight = get_topology_desc(platform="cuda", topology="1x1x8").devices
    seconds = seconds_on_one(BIG)
    for name in methods(BIG):
        each = {"8 x 1": costs(name, BIG, (8, 1), 8 * BIG.each, eight)}
        each["1 x 1"] = costs(name, BIG, (1, 1), BIG.each, eight)
        each["4 x 2"] = costs(name, BIG, (4, 2), 8 * BIG.each, eight)
        each["1 x 8"] = costs(name, BIG, (1, 8), 8 * BIG.each, eight)
        found[name] = {"seconds": seconds[name], "costs": {k: asdict(c) for k, c in each.items()}}
        print(name, found[name], flush=True)
    about = {"device": kind.device_kind, "jax": jax.__version__}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**about, "methods": found}, indent=1) + "\n")


# -- the page --------------------------------------------------------------------------------------


def table(rows: list[tuple[Any, ...]], head: str) -> str:
    names = head.split(" | ")
    lines = [names, ["---"] + ["---:"] * (len(names) - 2) + ["---"], *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in lines)


def by(c: Costs) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in c.runs.items()) or "none"


def row(name: str, c: Costs) -> tuple[Any, ...]:
    kib = lambda n: f"{n / 1024:,.1f}"
    return name, kib(c.traces), kib(c.temporary), f"{c.operations:,.0f}", kib(c.sent), by(c)


def eight_gpus() -> str:
    """What a machine with a GPU has found, if it has."""
    if not ON_GPU.exists():
        return ""
    found = json.loads(ON_GPU.read_text())
    rows, more = [], []
    for name, one in found["methods"].items():
        layouts = {k: Costs(**c) for k, c in one["costs"].items()}
        data, alone, mib = layouts["8 x 1"], layouts["1 x 1"], 2**20
        whole = one["seconds"] + data.seconds(8)
        rows.append(
            (
                name,
                f"{alone.traces / mib:,.0f} / {data.traces / mib:,.0f}",
                f"{alone.temporary / mib:,.0f} / {data.temporary / mib:,.0f}",
                f"{data.sent / mib:,.1f}",
                f"{one['seconds'] * 1e3:.1f}",
                f"{whole * 1e3:.1f}",
                f"{one['seconds'] / whole:.0%}",
            )
        )
        for k in ("4 x 2", "1 x 8"):
            c = layouts[k]
            sizes = f"{c.traces / mib:,.0f}", f"{c.temporary / mib:,.0f}", f"{c.sent / mib:,.0f}"
            more.append((name, k, *sizes, by(c)))
    head = "| traces, MiB: 1 / 8 | temporary, MiB: 1 / 8 | sent, MiB | one, ms | eight, ms | efficiency"
    return f"""
## Eight {found["device"]}

{BIG}, {BIG.each} sequences on each device;
its parameters are {
        BIG.bytes / 2**20:,.1f} MiB. Programs are compiled for eight of these devices, by a machine that has
one (jax {found["jax"]}); times are of that one, {
        BIG.each
    } sequences. Eight take that time, and in addition what
collectives are predicted to take, one after the other and without overlap: rings at {REACHED:.0%} of {
        LINK / 1e9:.0f} GB/s,
each after {START * 1e6:.0f} µs. XLA moves the sum of gradients out of the loop over chunks: there is one for
the sequence. A loss that is a mean over the batch is a sum of one number, in every step where steps go one by
one: what BPTT, steps and windows lose is that.

{table(rows, "batches over 8 " + head)}

Columns of weights over some or all of them, batches over the others; {8 * BIG.each} sequences in all:

{table(more, "rule | batches x columns | traces, MiB | temporary, MiB | sent, MiB | by")}
"""


def main() -> None:
    head = "devices | traces, KiB | temporary, KiB | operations | sent, KiB | by"
    ours, total = "D_RTRL in chunks", SMALL.each * 8
    data = {n: costs(ours, SMALL, (n, 1), SMALL.each * n) for n in COUNTS}
    through = {n: costs("BPTT", SMALL, (n, 1), SMALL.each * n) for n in (1, 8)}
    model = {n: costs(ours, SMALL, (1, n), total) for n in COUNTS}
    both = costs(ours, SMALL, (4, 2), total)
    model_through = {shape: costs("BPTT", SMALL, shape, total) for shape in ((1, 8), (4, 2))}
    larger = {k: costs(ours, SMALL, (8, 1), total * k) for k in (1, 2, 4)}
    others = {name: costs(name, SMALL, (8, 1), total) for name in methods(SMALL)}

    traces = [c.traces for c in data.values()]
    sent = {c.sent for c in [*larger.values(), *(data[n] for n in COUNTS[1:])]}
    same = lambda holds: "holds" if holds else "DOES NOT HOLD"
    spread = max(traces) / min(traces) - 1
    work = max(data[n].operations for n in COUNTS[1:]) / data[1].operations - 1
    text = f"""# Many devices: what each holds, computes and sends

{__doc__.split(chr(10) * 2)[1]}

{SMALL}; its parameters are {SMALL.bytes / 1024:,.1f} KiB.
jax {jax.__version__}.

## What must hold

| | limit | measured | |
|---|---|---:|---|
| traces of a device, 1 to 8 devices, {SMALL.each} sequences on each | equal within 2 % | {spread:.1%} | {
        same(spread <= 0.02)
    } |
| operations of a device, of 2 to 8 beside 1 | within 2 % | {work:+.1%} | {same(abs(work) <= 0.02)} |
| bytes sent, 2 to 8 devices, traces of 1, 2 and 4 times the size | one number | \
{", ".join(f"{s / 1024:,.1f} KiB" for s in sorted(sent))} | {same(len(sent) == 1)} |

## Batches over devices, {SMALL.each} sequences on each

{table([row(str(n), c) for n, c in data.items()], head)}

The same by BPTT:

{table([row(str(n), c) for n, c in through.items()], head)}

More sequences on each of 8 devices: traces grow, what is sent does not.

{table([row(f"8, {SMALL.each * k} on each", c) for k, c in larger.items()], head)}

Rules, on 8 devices:

{table([row(name, c) for name, c in others.items()], head.replace("devices", "rule"))}

## Columns of weights over devices, {total} sequences

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
{eight_gpus()}"""
    OUT.write_text(text)
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", type=Path, metavar="F", help="measure on a GPU and write what is found to F")
    chosen = parser.parse_args().gpu
    if chosen is None:
        main()
    else:
        on_gpu(chosen)
