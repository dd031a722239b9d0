"""Rank: its definition and what it becomes with all directions, samples, sequences, and long runs."""

from __future__ import annotations

from typing import Any

import pytest

import braintrace
from braintrace._rules.rank import per_sample

from ..oracle import Brute, bptt
from ..run import agree, compiled, difference, online, sequence
from ..zoo import CASES
from .test_gradients import graph_of, is_flat, loops_forever

ALL = 10**6  # more directions than any model here carries numbers
TOGETHER = {"norms_of_two_states": {"samples": None}}  # where samples act on each other


def by_definition() -> list[Any]:
    """Models on which the diagonal is approximate and some of the others, each with a rank and a window."""
    names = [
        n for i, (n, c) in enumerate(CASES.items()) if c.kind != "complex" and (not c.exact or i % 24 == 0)
    ]
    ways = [(1, 1), (3, 2), (3, 1), (1, 5), (1, 2), (3, 5)]
    every = 16
    return [
        pytest.param(n, *ways[i % len(ways)], marks=() if i % every == 1 else pytest.mark.slow)
        for i, n in enumerate(names)
    ]


@pytest.mark.parametrize(("name", "rank", "window"), by_definition())
def test_rank_equals_its_definition(name, rank, window):
    case, graph = CASES[name], graph_of(name)
    if not is_flat(graph) or loops_forever(graph):
        return  # BPTT speaks for these, below
    xs = sequence(case)
    learner = compiled(braintrace.D_RTRL(case.build(), rank=rank, **TOGETHER.get(name, {})), xs[0])
    found = online(learner, xs, window)
    brute = Brute(case.build(), xs[0], graph)
    samples = per_sample(learner.executor, learner.rule.samples).samples
    places = [(e.path, i, v) for e in learner.graph.module_info.carried for i, v in enumerate(e.invars)]
    leaves = []
    for var in samples.carried:
        ((path, i),) = ((path, i) for path, i, v in places if v is var)
        leaves.append([n for n, p in enumerate(brute.f.state_paths) if p == path][i])
    expected = brute.d_rtrl_rank(xs, window, rank, leaves, samples.axis)
    # where few directions are left, the basis itself is only known to half of the digits
    assert agree(expected, found, 1e-7), difference(expected, found)


@pytest.mark.parametrize(
    ("name", "window"),
    [
        pytest.param(n, 1 + i % 2, marks=() if i % 16 == 3 else pytest.mark.slow)
        for i, n in enumerate(CASES)
    ],
)
def test_with_all_directions_it_is_bptt(name, window):
    case, graph = CASES[name], graph_of(name)
    xs = sequence(case)
    learner = braintrace.D_RTRL(case.build(), rank=ALL, **TOGETHER.get(name, {}))
    if loops_forever(graph):
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            online(learner, xs, window)
        return
    found = online(learner, xs, window)
    truth = bptt(case.build(), xs)
    assert agree(truth, found, 1e-10), difference(truth, found)
    assert learner.report.exactness.exact, str(learner.report.exactness)
