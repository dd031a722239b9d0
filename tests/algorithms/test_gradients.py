"""Each rule against its definition, on every model of the zoo, in single steps and in windows."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest

import braintrace
from braintrace._compat import primitives

from ..oracle import Brute, bptt
from ..run import agree, difference, online, sequence
from ..zoo import CASES

ROUND_OFF = 1e-10


def is_flat(graph: Any) -> bool:
    """Whether brute force can follow every site: none is inside control flow."""
    return not any(s.context for s in graph.module_info.program.sites)


def loops_forever(graph: Any) -> bool:
    return any(n.primitive is primitives.while_p for n in graph.module_info.program.nodes)


@cache
def graph_of(name: str) -> Any:
    case = CASES[name]
    x = sequence(case, 1)[0]
    with warnings.catch_warnings(action="ignore"):
        return braintrace.compile_etrace_graph(case.build(), *(x if isinstance(x, tuple) else (x,)))


EXACT = [name for name, case in CASES.items() if case.exact]


@pytest.mark.parametrize("name", EXACT)
def test_d_rtrl_equals_bptt_where_the_recurrence_is_local(name):
    case = CASES[name]
    xs = sequence(case)
    found = online(braintrace.D_RTRL(case.build()), xs)
    truth = bptt(case.build(), xs, forward=loops_forever(graph_of(name)))
    assert agree(truth, found, ROUND_OFF), difference(truth, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rules_equal_their_definitions(name):
    case, graph = CASES[name], graph_of(name)
    if not is_flat(graph):
        return  # BPTT speaks for these, above
    xs = sequence(case)
    brute = Brute(case.build(), xs[0], graph)
    brute.forward = loops_forever(graph)
    truths = {
        "D_RTRL": lambda window: brute.d_rtrl(xs, window),
        "ES_D_RTRL": lambda window: brute.es_d_rtrl(xs, 0.7, window),
    }
    learners = {
        "D_RTRL": lambda method: braintrace.D_RTRL(case.build(), vjp_method=method),
        "ES_D_RTRL": lambda method: braintrace.ES_D_RTRL(case.build(), 0.7, vjp_method=method),
    }
    for rule, truth in truths.items():
        for window in (None, 2) if not brute.forward else (None,):
            method = "multi-step" if window else "single-step"
            found = online(learners[rule](method), xs, window)
            expected = truth(window)
            assert agree(expected, found, ROUND_OFF), (rule, window, difference(expected, found))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in CASES if not loops_forever(graph_of(n))])
def test_a_window_over_everything_is_bptt(name):
    case = CASES[name]
    xs = sequence(case)
    truth = bptt(case.build(), xs)
    found = online(braintrace.D_RTRL(case.build(), vjp_method="multi-step"), xs, len(xs))
    assert agree(truth, found, ROUND_OFF), difference(truth, found)


def test_approximate_rules_differ_from_bptt_where_paths_are_dropped():
    """The tests above can fail: on these models the rules are not BPTT."""
    for name in [n for n, c in CASES.items() if c.exact is False][:6]:
        case = CASES[name]
        xs = sequence(case)
        found = online(braintrace.D_RTRL(case.build()), xs)
        assert not agree(bptt(case.build(), xs), found, 1e-3)
