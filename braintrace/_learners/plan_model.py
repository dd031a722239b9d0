"""Estimate the costs of training a model by each rule, before anything is allocated: `braintrace.plan`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from dataclasses import replace

import brainstate
import jax
import jax.numpy as jnp

from .. import _rules
from .._frontends.module_function import read_module
from .._report.plan import Layout, Plan, PlanRequest, plan_learner
from .._types import Mesh, Model, Option, PyTree
from . import pickling
from .compiled_step import CompiledStep
from .learner import Learner
from .rule_choice import Rules, add_d_rtrl, read_rules
from .stateful import ETraceAlgorithm

RULES = ("D_RTRL", "ES_D_RTRL", "RTRL", "BPTT")


def plan(
    model: Model,
    x0: PyTree,
    batch_size: int | None = None,
    length: int = 100,
    *,
    rules: Rules = RULES,
    chunk_sizes: Iterable[int] | None = None,
    memory_budget: int | None = None,
    mesh: Mesh | None = None,
    **options: Option,
) -> Plan:
    """Estimate the memory and operations of each rule on a sequence; the model is not changed.

    Args:
        model: A module of brainstate.
        x0: The input of one step, or a tuple of several; each an array or a `jax.ShapeDtypeStruct`.
        batch_size: Take the states as `init_all_states(model, batch_size=batch_size)` would make them.
            Default the states as they are.
        length: The number of steps of the sequence. Default 100.
        rules: Rules, as `braintrace.compare` takes them. Default D_RTRL, ES_D_RTRL, RTRL and BPTT.
        chunk_sizes: Steps per backward pass. Default 1, about the square root of the length, and all steps.
        memory_budget: The bytes that the recommendation may use on each device. Default the memory of the
            device, or half of the machine's, which the devices of a CPU share.
        mesh: A mesh of devices; all bytes are then those of one of them. The first axis of states and of `x0`
            is sharded over the first axis of the mesh; the last axis of states and parameters over 'model',
            or else the second axis. Parameters that are on a mesh stay as they are.
        **options: `window`, `rank`, `basis` and `across` add a row for D_RTRL with these options.

    Returns:
        A `Plan`: a row for each rule and chunk size, and a recommendation.

    >>> import braintrace, jax, jax.numpy as jnp
    >>> x0 = jax.ShapeDtypeStruct((16, 3), jnp.float32)
    >>> cell = braintrace.nn.GRUCell(3, 8)
    >>> costs = plan(cell, x0, batch_size=16, length=20, rules=["D_RTRL"], chunk_sizes=[20])
    >>> costs.row("D_RTRL").trace_bytes  # two products of 11 inputs and a bias, for each sample and unit
    12288
    """
    if isinstance(model, ETraceAlgorithm):
        raise TypeError("`plan` takes the model, not a learner of it: `plan(learner.model, ...)`.")
    is_struct = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    struct = lambda a: a if is_struct(a) else jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))
    args = jax.tree.map(struct, x0 if isinstance(x0, tuple) else (x0,))
    twin = _abstract_copy(model, batch_size)
    layout = None if mesh is None else Layout.of(mesh)
    if layout is not None:
        args = jax.tree.map(layout.of_input, args)
        parameters = model.states(brainstate.ParamState)  # they keep the sharding that they have
        for path, state in twin.states().items():
            place = layout.of_param if path in parameters else layout.of_state
            state.value = jax.tree.map(place, parameters[path].value if path in parameters else state.value)
    function = read_module(twin, args)
    learner = Learner(CompiledStep(function, _rules.D_RTRL(), "ops", None), function.carry.like)
    with warnings.catch_warnings(action="ignore"):
        _ = learner.graph
    request = read_request(length, rules, chunk_sizes, memory_budget, **options)
    return replace(plan_learner(learner, request, layout), batch_size=batch_size)


def read_request(
    length: int,
    rules: Rules = RULES,
    chunk_sizes: Iterable[int] | None = None,
    memory_budget: int | None = None,
    **options: Option,
) -> PlanRequest:
    """Read the rules of a plan; `options` of D_RTRL add a row."""
    return PlanRequest(length, add_d_rtrl(read_rules(rules), options), chunk_sizes, memory_budget)


def _abstract_copy(model: Model, batch_size: int | None) -> Model:
    """Copy a model, with shapes in place of values."""
    memo: dict[int, object] = {}
    for state in model.states().values():
        memo[id(state)] = pickling.copy_state(state)
        memo.update({id(leaf): leaf for leaf in jax.tree.leaves(state.value)})
    twin = copy.deepcopy(model, memo)
    key = brainstate.random.DEFAULT.value

    def init() -> PyTree:
        if batch_size is not None:
            brainstate.nn.init_all_states(twin, batch_size=batch_size)
        return {path: state.value for path, state in twin.states().items()}

    try:
        shapes = jax.eval_shape(init)
    finally:
        brainstate.random.DEFAULT.value = key
    for path, state in twin.states().items():
        state.value = shapes[path]
    return twin
