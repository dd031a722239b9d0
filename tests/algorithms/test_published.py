"""The choices that published rules are made of, and each rule against its definition."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace._executor.executor import ETraceGraphExecutor
from braintrace._executor.own_diagonal import own_diagonals
from braintrace._frontends import compile_etrace_graph

from ..oracle import Brute
from ..run import as_args, every, sequence
from ..zoo import CASES

ROUND_OFF = 1e-10

# ops from a state to itself: alone, behind another one, in control flow; several states, samples or none
RECURRENT = [
    "rnn", "gru", "lstm_fused", "recurrent_conv", "recurrent_lora", "rnn_batched", "lif_recurrent",
    "residual", "scan_recurrent", "gru_fused", "lstm",
    *(n for n, c in CASES.items() if c.kind == "recurrent"),
]  # fmt: skip


@pytest.mark.parametrize("name", every(3, list(dict.fromkeys(RECURRENT))))
@pytest.mark.filterwarnings("ignore")
def test_the_own_diagonal_is_that_of_the_whole_step(name):
    case = CASES[name]
    x = sequence(case, 1)[0]
    model = case.build()
    graph = compile_etrace_graph(model, *as_args(x))
    executor, info = ETraceGraphExecutor(graph), graph.module_info
    fixed = [leaf for e in info.entries if e.is_fixed for leaf in jax.tree.leaves(e.state.value)]
    rest = [jax.tree.leaves(e.state.value) for e in info.entries if not e.is_fixed]
    args = (fixed, jax.tree.leaves(as_args(x)), list(info.program.consts.values()), rest)

    def found() -> Any:
        _, _, env, operands = executor.forward(*args)
        local = executor.jacobians(env, operands)
        return own_diagonals(executor, env, local.D, local.J)

    for k, blocks in jax.jit(found)().items():
        wanted = Brute(model, x, graph).own_blocks(k, x)
        assert np.max(np.abs(wanted)) > 0
        assert np.max(np.abs(np.asarray(blocks).reshape(wanted.shape) - wanted)) < ROUND_OFF


def test_samples_share_what_an_op_does_to_a_unit():
    case = CASES["rnn_batched"]
    x = sequence(case, 1)[0]
    graph = compile_etrace_graph(case.build(), x)
    executor, info = ETraceGraphExecutor(graph), graph.module_info
    zeros = lambda vs: [jnp.zeros(v.aval.shape, v.aval.dtype) for v in vs]
    fixed = zeros(v for e in info.fixed for v in e.invars)

    def found() -> Any:
        _, _, env, operands = executor.forward(fixed, [x], [], [zeros(e.invars) for e in info.carried])
        local = executor.jacobians(env, operands)
        return own_diagonals(executor, env, local.D, local.J)

    found()
    (plan,) = executor.planned["own diagonal"].values()
    (crossing,) = plan.crossings
    assert crossing.ones[0].max() + 1 == 2  # two calls on two samples: four places
