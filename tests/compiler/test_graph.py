"""What the compiler finds in each model of the zoo, what it says of models that it refuses, and how fast."""

from __future__ import annotations

import linecache
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace as bt
from braintrace import (
    CompilationError,
    DiagnosticKind,
    DiagnosticLevel,
    NotSupportedError,
    compile_etrace_graph,
)
from braintrace._compiler.evaluation import run
from braintrace._compiler.program import Var
from tests.run import digest, every
from tests.zoo import CASES, Broadcast, Case, Draw, Step

ROOT = Path(__file__).parents[2]


def example(case: Case, seed: int = 1) -> Any:
    return case.x(np.random.RandomState(seed))


def compiled(case: Case) -> tuple[Any, list[Any]]:
    """The graph of a case, and the warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        graph = compile_etrace_graph(case.build(), example(case))
    return graph, found


def graph_of(name: str) -> Any:
    return compiled(CASES[name])[0]


# -- the table -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_zoo(name):
    case = CASES[name]
    graph, found = compiled(case)
    relations = graph.hidden_param_op_relations
    assert [g.hidden_paths for g in graph.hidden_groups] == case.groups
    assert [
        (
            r.primitive.name,
            r.weight_path,
            r.connected_hidden_paths,
            {p: str(c) for p, c in r.path_classification.items()},
        )
        for r in relations
    ] == case.relations
    for (i, j), expected in case.positions.items():
        positions = relations[i].position_maps[j]
        assert positions.on_hidden == isinstance(expected, Broadcast)
        if isinstance(expected, str):
            assert positions.map.ravel().tolist() == [*range(positions.map.size)]
        else:
            table = expected.map if isinstance(expected, Broadcast) else expected
            assert positions.map.tolist() == np.asarray(table).tolist()
    assert sum(len(r.position_maps) for r in relations) == len(case.positions)
    assert len(found) <= 1
    if case.exact:
        assert not found, found[0].message
        assert all(r.complete for r in relations)
        assert all(g.is_local for g in graph.hidden_groups)


def test_zoo_is_large_enough():
    assert len(CASES) >= 70
    assert {case.name for case in CASES.values()} == set(CASES)


class Numbers:
    """A traced step as a function of its states, its weights and what is added at each site."""

    def __init__(self, graph: Any, x: Any) -> None:
        self.info = info = graph.module_info
        states = [leaf for e in info.entries for leaf in jax.tree.leaves(e.state.value)]
        self.values = dict(zip(info.program.inputs, [*jax.tree.leaves(x), *states], strict=True))
        self.hidden = [h for g in graph.hidden_groups for h in g.hidden]
        self.traced = {r.site.index for r in graph.hidden_param_op_relations}
        read = {a for node in info.program.nodes for a in node.inputs if isinstance(a, Var)}
        self.others = [
            o
            for e in info.entries
            for v, o in zip(e.invars, e.outvars, strict=True)
            if not e.is_param and v in read and v not in info.hidden_path_to_invar.values() and o is not v
        ]
        self.params = [v for e in info.params for v in e.invars]
        self.zeros = {s.index: jnp.zeros(s.shape, s.output.aval.dtype) for s in info.program.sites}

    def old(self) -> list[Any]:
        return [self.values[h.invar] for h in self.hidden]

    def weights(self) -> list[Any]:
        return [self.values[v] for v in self.params]

    def env(self, old: Any, weights: Any, deltas: Any, local: bool) -> dict[Any, Any]:
        """Every value of the step; `local` cuts it at the sites, else at the weights that have a trace."""
        values = {**self.values, **dict(zip(self.params, weights, strict=True))}
        values.update(zip([h.invar for h in self.hidden], old, strict=True))

        def at_site(site: Any, delta: Any, operands: list[Any]) -> tuple[Any, None]:
            first = 0 if local else site.num_inputs if site.index in self.traced else len(operands)
            operands = [*operands[:first], *map(lax.stop_gradient, operands[first:])]
            return site.primitive.bind(*operands, **site.params) + delta, None

        return run(self.info.program, [values[v] for v in self.info.program.inputs], at_site, deltas)[2]

    def new(self, old: Any, weights: Any, deltas: Any, local: bool = False) -> tuple[list[Any], list[Any]]:
        env = self.env(old, weights, deltas, local)
        floats = [o for o in self.others if o in env and jnp.issubdtype(o.aval.dtype, jnp.inexact)]
        return [env[h.outvar] for h in self.hidden], [env[o] for o in floats]


def same(a: Any, b: Any) -> Any:
    """Whether each element of `a` equals each of `b`."""
    return np.reshape(a, (*np.shape(a), *[1] * np.ndim(b))) == np.asarray(b)


def kept(graph: Any, group: Any, hidden: Any, site: Any) -> Any:
    """The part of `dh/dy` that traces keep."""
    result = np.zeros((*hidden.invar.aval.shape, *site.shape), bool)
    for relation in graph.hidden_param_op_relations:
        for other, positions in zip(relation.hidden_groups, relation.position_maps, strict=True):
            if relation.site is site and other is group:
                if positions.on_hidden:
                    result |= same(
                        positions.map.ravel()[hidden.positions],
                        np.arange(np.prod(site.shape)).reshape(site.shape),
                    )
                else:
                    result |= same(hidden.positions, positions.map)
    return result


# a leaky readout that traces follow is exact by its filter
SOME = [n for n, c in CASES.items() if c.kind != "complex" and n != "lif_and_leaky_readout"]
SOME = [n for n in SOME if not CASES[n].exact or digest(n) % 8 == 0]  # gradients speak for the others


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_exact_is_what_the_jacobians_say(name):
    """Online gradients are exact if all derivatives of a step lie where traces are kept."""
    case = CASES[name]
    graph, x = graph_of(name), example(case)
    step = Numbers(graph, x)
    jacobian = jax.jacfwd if case.kind == "while" else jax.jacrev
    args = step.old(), step.weights(), step.zeros

    def jacobians(*args):
        local, _ = jacobian(lambda old: step.new(old, *args[1:], local=True))(args[0])
        return *jacobian(step.new, (0, 1, 2))(*args), local

    new, others, local = jax.tree.map(np.asarray, jax.jit(jacobians)(*args))
    group_of = {h.outvar: g for g in graph.hidden_groups for h in g.hidden}
    exact = all(not np.any(d) for _, *rest in others for d in jax.tree.leaves(rest))
    for (by_old, by_weight, by_site), by_old_locally, h in zip(new, local, step.hidden, strict=True):
        group = group_of[h.outvar]
        for whole, part, other in zip(by_old, by_old_locally, step.hidden, strict=True):
            block = same(h.positions, other.positions) & (group_of[other.outvar] is group)
            exact &= np.allclose(np.where(block, part, 0), whole, rtol=0, atol=1e-12)
        for site in graph.module_info.program.sites:
            exact &= not np.any(by_site[site.index] * ~kept(graph, group, h, site))
        exact &= not any(map(np.any, by_weight))
    assert exact == case.exact


# -- the parts of a graph ------------------------------------------------------------------------------

PARTS = """leaky leaky_batched rnn gru gru_fused lstm lstm_fused rotation broadcast two_groups two_layers
residual cascade_of_three minus_old hidden_group_state hidden_tree_state unit scalar copies swapped
leak_scalar conv cond scan_3 scan_recurrent cond_in_scan fori_loop_over_units checkpoint vmap_both alif_vjp
plain_recurrent""".split()


@pytest.mark.parametrize("name", every(3, PARTS))
def test_slices_compute_the_new_states(name):
    graph = graph_of(name)
    step = Numbers(graph, example(CASES[name]))
    args = step.old(), step.weights(), step.zeros
    env = step.env(*args, local=False)
    for group in graph.hidden_groups:
        old, new = ([env[v] for v in vs] for vs in (group.hidden_invars, group.hidden_outvars))
        consts = [env[v] for v in group.transition_jaxpr_constvars]
        again = jax.core.eval_jaxpr(
            group.transition_jaxpr.jaxpr, group.transition_jaxpr.consts, *old, *consts
        )
        jax.tree.map(np.testing.assert_allclose, again, new)
        whole = group.concat_hidden(old)
        assert whole.shape == (*group.varshape, group.num_state)
        jax.tree.map(np.testing.assert_array_equal, group.split_hidden(whole), old)
    for relation in graph.hidden_param_op_relations:
        if relation.site.context:
            continue  # its y is not among the values of the step
        consts = [[env[v] for v in vs] for vs in relation.y_to_hidden_group_constvars]
        found = relation.y_to_hidden_groups(env[relation.y], consts)
        apart = relation.y_to_hidden_groups(env[relation.y], consts, concat_hidden_vals=False)
        for group, whole, parts, jaxpr, given in zip(
            relation.hidden_groups, found, apart, relation.y_to_hidden_group_jaxprs, consts, strict=True
        ):
            new = [env[v] for v in group.hidden_outvars]
            np.testing.assert_allclose(whole, group.concat_hidden(new))
            jax.tree.map(np.testing.assert_allclose, parts, new)
            again = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, env[relation.y], *given)
            jax.tree.map(np.testing.assert_allclose, again, new)


@pytest.mark.parametrize("name", every(3, PARTS))
def test_diagonal_jacobian(name):
    graph = graph_of(name)
    step = Numbers(graph, example(CASES[name]))
    args = step.old(), step.weights(), step.zeros
    env = step.env(*args, local=False)
    local, _ = jax.jit(jax.jacrev(lambda old: step.new(old, *args[1:], local=True)))(args[0])
    where = {h.outvar: i for i, h in enumerate(step.hidden)}
    for group in graph.hidden_groups:
        old = [env[v] for v in group.hidden_invars]
        consts = [env[v] for v in group.transition_jaxpr_constvars]
        found = jax.jit(group.diagonal_jacobian)(old, consts)
        blocks = []
        for new in group.hidden:
            row = []
            for other in group.hidden:
                part = np.asarray(local[where[new.outvar]][where[other.outvar]])
                size = int(np.prod(group.varshape, dtype=int))
                part = part.reshape(size, new.num_state, size, other.num_state)
                row.append(np.stack([part[k, :, k] for k in range(size)]))
            blocks.append(np.concatenate(row, -1))
        expected = np.concatenate(blocks, -2).reshape(found.shape)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", every(3, PARTS))
def test_perturbed_step_without_perturbation_is_the_step(name):
    graph = graph_of(name)
    info, perturb = graph.module_info, graph.hidden_perturb
    values = list(Numbers(graph, example(CASES[name])).values.values())
    plain = jax.core.eval_jaxpr(info.closed_jaxpr.jaxpr, info.closed_jaxpr.consts, *values)
    jaxpr = perturb.perturb_jaxpr
    again = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *values, *perturb.init_perturb_data())
    jax.tree.map(np.testing.assert_allclose, again, plain)


def perturbed(name: str) -> tuple[Any, list[Any], dict[str, Any]]:
    """The graph, the inputs of the step, and the derivative of its output by each state's perturbation."""
    graph = graph_of(name)
    values = list(Numbers(graph, example(CASES[name])).values.values())
    perturb = graph.hidden_perturb
    count = len(graph.module_info.out_atoms)
    found = jax.jacrev(lambda d: perturb.call(values, d)[:count])(perturb.init_perturb_data())
    paths = [".".join(p) for p in perturb.perturb_hidden_paths]
    return graph, values, dict(zip(paths, found[0], strict=True))


def test_perturbation_is_seen_outside_its_group():
    graph, values, signal = perturbed("two_layers")
    w2 = values[graph.module_info.program.inputs.index(graph.module_info.weight_path_to_invars[("w2",)][0])]
    a, b = (v for v in jax.core.eval_jaxpr(graph.module_info.closed_jaxpr.jaxpr, [], *values)[-2:])
    by_b = np.diag(1 - np.tanh(b) ** 2)
    np.testing.assert_allclose(signal["b"], by_b)
    np.testing.assert_allclose(signal["a"], by_b @ (np.diag(1 - np.tanh(a) ** 2) @ w2).T)


def test_perturbation_is_not_seen_inside_its_group():
    _, _, signal = perturbed("cascade")  # b reads a, and the output b alone
    assert not np.any(signal["a"])
    assert np.all(np.diag(signal["b"]) > 0)


def test_module_info():
    case = CASES["lstm_fused"]
    model, x = case.build(), example(case)
    info = bt.extract_module_info(model, x)
    assert info.weight_path_to_invars.keys() == {("w",)}
    assert [v.aval.shape for v in info.weight_path_to_invars[("w",)]] == [(8,), (5, 8)]
    assert list(info.hidden_path_to_invar) == [("c",), ("h",)]
    paths = [(e.path, e.state) for e in info.entries]
    assert paths == [(("w",), model.w), (("c",), model.c), (("h",), model.h)]
    assert [v.aval.shape for v in info.arg_invars] == [x.shape]
    assert info.dict().keys() >= {"closed_jaxpr", "program", "hidden"}
    assert [v.aval.shape for v in info.out_atoms] == [(2, 2)]
    assert len(info.jaxpr.outvars) == 5


def test_find_functions_agree_with_the_graph():
    case = CASES["residual"]
    model, x = case.build(), example(case)
    graph, info = compile_etrace_graph(model, x), bt.extract_module_info(model, x)
    for found in (bt.find_hidden_groups_from_minfo(info), bt.find_hidden_groups_from_module(model, x)):
        groups, by_path = found
        assert [g.hidden_paths for g in groups] == [g.hidden_paths for g in graph.hidden_groups]
        assert {p: g.index for p, g in by_path.items()} == {
            p: g.index for p, g in graph.hid_path_to_group.items()
        }
    for found in (
        bt.find_hidden_param_op_relations_from_minfo(info),
        bt.find_hidden_param_op_relations_from_module(model, x),
    ):
        expected = [r.path_classification for r in graph.hidden_param_op_relations]
        assert [r.path_classification for r in found] == expected
    with pytest.raises(ValueError, match="another trace"):
        bt.find_hidden_param_op_relations_from_minfo(info, by_path)
    _, by_path = bt.find_hidden_groups_from_minfo(info)
    (relation, *_) = bt.find_hidden_param_op_relations_from_minfo(info, by_path)
    assert all(g is by_path[p] for g in relation.hidden_groups for p in g.hidden_paths)
    for found in (
        bt.add_hidden_perturbation_from_minfo(info),
        bt.add_hidden_perturbation_in_module(model, x),
    ):
        assert found.perturb_hidden_paths == graph.hidden_perturb.perturb_hidden_paths
    assert compile_etrace_graph(model, x, include_hidden_perturb=False).hidden_perturb is None


def test_dicts_hold_the_names_of_the_contract():
    graph = graph_of("lstm_fused")
    assert list(graph.dict()) == [
        "module_info",
        "hidden_groups",
        "hid_path_to_group",
        "hidden_param_op_relations",
        "hidden_perturb",
        "diagnostics",
    ]
    group, relation = graph.hidden_groups[0], graph.hidden_param_op_relations[0]
    for name in (
        "index",
        "hidden_paths",
        "hidden_states",
        "hidden_invars",
        "hidden_outvars",
        "num_state",
        "varshape",
    ):
        assert group.dict()[name] == getattr(group, name)
    names = """primitive x_var y_var hidden_groups connected_hidden_paths eqn_params path_classification
    trainable_vars trainable_paths trainable_leaf_indices trainable_param_states
    trainable_processing_chains"""
    for name in names.split():
        assert relation.dict()[name] == getattr(relation, name)
    assert (relation.x, relation.y, relation.path) == (relation.x_var, relation.y_var, relation.weight_path)
    assert relation.trainable_paths == {"weight": ("w",), "bias": ("w",)}
    assert relation.trainable_leaf_indices == {"weight": 1, "bias": 0}
    assert relation.trainable_param_states["weight"] is graph.module_info.model.w


def test_weights_that_are_made_of_parameters():
    relation = graph_of("weight_product").hidden_param_op_relations[0]
    assert relation.param_paths == [("w1",), ("w2",)]
    assert [p.name for p in relation.trainable_processing_chains["weight"]] == ["dot_general"]
    assert graph_of("leaky").hidden_param_op_relations[0].trainable_processing_chains == {"weight": ()}


def test_report():
    report = bt.CompilationReport(graph_of("weight_product"))
    assert report.etrace_weights == {("w1",): [("h",)], ("w2",): [("h",)]}
    assert report.excluded_weights == {}
    report = bt.CompilationReport(graph_of("gru"))
    assert list(report.etrace_weights) == [("wz",), ("wh",)]
    assert list(report.excluded_weights) == [("wr",)]
    assert "another marked op" in report.excluded_weights["wr",]

    def readout_in_a_loop(p, s, x):
        h = 0.9 * s.h + bt.matmul(x, p.w)
        return {"h": h}, lax.scan(lambda c, _: (bt.matmul(c, p.u), None), h, None, 2)[0]

    report = bt.CompilationReport(
        compile_etrace_graph(Step(readout_in_a_loop, {"w": (3, 4), "u": (4, 4)}, {"h": 4}), jnp.ones(3))
    )
    assert report.excluded_weights == {("u",): "reaches no hidden state"}
    report = bt.CompilationReport(graph_of("running_mean"))
    assert report.dynamic_states == [("m",)]
    report = bt.CompilationReport(graph_of("plain_bias_of_state"))
    assert report.excluded_weights == {("b",): "feeds a hidden state without a marked op"}
    assert report.counts["relations"] == report.counts["etrace_weights"] == 1
    assert "matmul w" in report.to_str()
    assert "[INFO]" not in report.to_str(1)
    assert all(str(r) in report.to_str(2) for r in report.diagnostics if r.level is bt.DiagnosticLevel.INFO)


def test_findings_of_one_kind_or_path():
    graph, kind = graph_of("gru"), bt.DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT
    (found,) = graph.explain(kind=kind)
    assert (found.kind, found.weight_path) == (kind, ("wr",))
    assert found in graph.explain(weight_path=("wr",))
    assert all(("h",) in r.hidden_paths for r in graph.explain(hidden_path=("h",)))
    assert graph.explain(kind=kind, weight_path=("wz",)) == ()
    assert graph.explain() == str(graph)


def test_a_path_that_is_left_out_is_reported():
    for name, kind in {
        "layer_norm": DiagnosticKind.RELATION_PARTIAL_PATH,
        "plain_recurrent": DiagnosticKind.HIDDEN_STATE_MIXED,
        "roll_of_state": DiagnosticKind.HIDDEN_STATE_MIXED,
        "cascade_rolled": DiagnosticKind.HIDDEN_STATE_CASCADE,
        "overlapping_pool": DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH,
        "weight_that_changes": DiagnosticKind.TRAINABLE_INVAR_NOT_PARAMSTATE,
        "vmap_of_cond": DiagnosticKind.TRAINABLE_INVAR_NOT_PARAMSTATE,
    }.items():
        graph, found = compiled(CASES[name])
        records = [r for r in graph.diagnostics if r.kind is kind]
        assert records
        assert all(r.level == DiagnosticLevel.WARNING for r in records)
        assert records[0].message in str(found[0].message)
        assert points_at(records[0].message, "tests/zoo.py") or kind is DiagnosticKind.HIDDEN_STATE_CASCADE


def test_what_is_not_worth_a_warning():
    for name, kind in {
        "gru": DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT,
        "gru_fused": DiagnosticKind.RELATION_PARTIAL_PATH,
        "marked_readout": DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL,
        "cascade": DiagnosticKind.HIDDEN_GROUP_MERGED,
        "weight_product": DiagnosticKind.PYTREE_WEIGHT_LEAF_AMBIGUOUS,
        "scan_3": DiagnosticKind.PRIMITIVE_INSIDE_CONTROL_FLOW,
        "leaky": DiagnosticKind.RELATION_INCLUDED,
    }.items():
        graph, found = compiled(CASES[name])
        assert not found
        assert kind in [r.kind for r in graph.diagnostics]


# -- models that it refuses, or warns of ---------------------------------------------------------------


def points_at(message: str, file: str, code: str = "") -> bool:
    """Whether a message names a line of `file` with `code` in it."""
    found = re.findall(rf"(\S*{re.escape(file)}):(\d+)", message)
    return any(code in linecache.getline(path, int(line)) for path, line in found)


def refused(f: Any, error: type[Exception], *, params: Any = None, states: Any = None, code: str) -> str:
    """The message with which a model is refused; it must name the line with `code`."""
    model = Step(f, {"w": (3, 4)} if params is None else params, {"h": 4} if states is None else states)
    with pytest.raises(error) as found:
        compile_etrace_graph(model, jnp.ones(3))
    message = str(found.value)
    assert points_at(message, "test_graph.py", code), message
    return message


def test_while_with_an_op_inside():
    def f(p, s, x):
        y = lax.while_loop(lambda c: c.sum() < 1.0, lambda c: c + bt.matmul(x, p.w), jnp.zeros(4))
        return {"h": s.h + y}, y

    message = refused(f, NotSupportedError, code="bt.matmul(x, p.w)")
    assert "`etp_matmul` of `w`" in message
    assert "while" in message
    assert "fori_loop" in message


def test_op_inside_while_inside_scan():
    def f(p, s, x):
        def body(h, _):
            return lax.while_loop(lambda c: c.sum() < 1.0, lambda c: c + bt.matmul(x, p.w), h), None

        h, _ = lax.scan(body, s.h, length=2)
        return {"h": h}, h

    assert "`w`" in refused(f, NotSupportedError, code="bt.matmul(x, p.w)")


class Rewrites(brainstate.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.h = brainstate.ParamState(jnp.ones((3, 4))), brainstate.HiddenState(jnp.ones(4))

    def update(self, x):
        self.h.value = 0.9 * self.h.value + bt.matmul(x, jnp.tanh(self.w.value))
        self.w.value = 0.9 * self.w.value
        return self.h.value


def test_rewritten_parameter():
    with pytest.raises(CompilationError) as found:
        compile_etrace_graph(Rewrites(), jnp.ones(3))
    message = str(found.value)
    assert "`w`" in message
    assert "`etp_matmul` of `w`" in message
    assert points_at(message, "test_graph.py", "self.w.value = 0.9")
    assert points_at(message, "test_graph.py", "bt.matmul(x, jnp.tanh(self.w.value))")


def test_no_hidden_state():
    def f(p, s, x):
        return {}, bt.matmul(x, p.w) + s.m

    states = {"m": lambda draw: brainstate.LongTermState(draw(4))}
    message = refused(f, CompilationError, states=states, code="bt.matmul(x, p.w)")
    assert "no hidden state" in message
    assert "`m` (LongTermState)" in message
    assert "`etp_matmul` of `w`" in message


def test_integer_weight():
    def f(p, s, x):
        return {"h": s.h + bt.matmul(x, p.w.astype(x.dtype))}, x

    message = refused(f, CompilationError, params={"w": np.ones((3, 4), int)}, code="bt.matmul(x, p.w")
    assert "`w`" in message
    assert "int64" in message


def test_no_marked_op():
    def f(p, s, x):
        h = 0.9 * s.h + x @ p.w
        return {"h": h}, h

    with pytest.warns(UserWarning, match=r"no marked op.*`w`.*braintrace.matmul") as found:
        graph = compile_etrace_graph(Step(f, {"w": (3, 4)}, {"h": 4}), jnp.ones(3))
    assert len(found) == 1
    assert [r.kind for r in graph.diagnostics] == [DiagnosticKind.NO_MARKED_OP]
    assert points_at(str(found[0].message), "test_graph.py", "x @ p.w")
    assert points_at(f"{found[0].filename}:{found[0].lineno}", "test_graph.py", "compile_etrace_graph")


def test_weight_that_is_no_parameter():
    def f(p, s, x):
        h = 0.9 * s.h + bt.matmul(x, jnp.ones((3, 4))) + bt.matmul(x, p.w)
        return {"h": h}, h

    with pytest.warns(UserWarning, match="no `ParamState` behind") as found:
        graph = compile_etrace_graph(Step(f, {"w": (3, 4)}, {"h": 4}), jnp.ones(3))
    assert len(found) == 1
    assert points_at(str(found[0].message), "test_graph.py", "jnp.ones((3, 4))")
    assert len(graph.hidden_param_op_relations) == 1


def test_op_inside_a_function_with_its_own_derivative():
    @jax.custom_jvp
    def product(x, w):
        return bt.matmul(x, w)

    product.defjvps(None, lambda t, ans, x, w: x @ t)

    def f(p, s, x):
        h = 0.9 * s.h + product(x, p.w)
        return {"h": h}, h

    with pytest.warns(UserWarning, match="derivative rule of its own") as found:
        graph = compile_etrace_graph(Step(f, {"w": (3, 4)}, {"h": 4}), jnp.ones(3))
    assert points_at(str(found[0].message), "test_graph.py", "product(x, p.w)")
    assert len(graph.hidden_param_op_relations) == 1


def test_op_inside_such_a_function_inside_a_loop():
    @jax.custom_vjp
    def product(x, w):
        return bt.matmul(x, w)

    product.defvjp(lambda x, w: (bt.matmul(x, w), x), lambda x, g: (g, jnp.outer(x, g)))

    def f(p, s, x):
        h, _ = lax.scan(lambda h, _: (0.9 * h + product(x, p.w), None), s.h, length=2)
        return {"h": h}, h

    with pytest.warns(UserWarning, match="derivative rule of its own"):
        graph = compile_etrace_graph(Step(f, {"w": (3, 4)}, {"h": 4}), jnp.ones(3))
    assert len(graph.hidden_param_op_relations) == 1


def test_op_inside_something_unknown():
    product = jax.custom_batching.custom_vmap(lambda x, w: bt.matmul(x, w))
    product.def_vmap(lambda *args: None)

    def f(p, s, x):
        h = 0.9 * s.h + product(x, p.w)
        return {"h": h}, h

    message = refused(f, NotSupportedError, code="product(x, p.w)")
    assert "`etp_matmul` of `w` is inside `custom_vmap_call`" in message


@pytest.mark.parametrize(
    ("layer", "x", "start", "words"),
    [
        (
            lambda: bt.nn.GRUCell(3, 4),
            3,
            False,
            "in `layers.1` \\(GRUCell\\): .*no attribute 'h'.*init_all_states",
        ),
        (lambda: bt.nn.GRUCell(5, 4), 3, True, "in `layers.1` \\(GRUCell\\), with arrays of shapes"),
        (lambda: bt.nn.LIF(3), 3, True, "in `layers.1` \\(LIF\\): .*brainstate.environ.set\\(dt="),
    ],
    ids=["not initialised", "shape", "no time step"],
)
def test_a_failing_layer_is_named_not_printed(layer, x, start, words):
    with jax.numpy_rank_promotion("allow"):
        model = brainstate.nn.Sequential(bt.nn.Linear(3, 3), layer())
    if start:
        brainstate.nn.init_all_states(model)
    with pytest.raises(CompilationError, match=words) as caught:
        bt.compile_etrace_graph(model, jnp.ones(x))
    assert "\n" not in str(caught.value)


def test_states_that_are_not_initialised():
    class Late(brainstate.nn.Module):
        def init_state(self):
            self.h = brainstate.HiddenState(jnp.zeros(4))

        def update(self, x):
            self.h.value = self.h.value + x
            return self.h.value

    with pytest.raises(CompilationError, match="init_all_states"):
        compile_etrace_graph(Late(), jnp.ones(4))


def test_many_findings_are_one_warning():
    def f(p, s, x):
        y = sum(jax.nn.softmax(bt.matmul(x, w)) for w in (p.a, p.b, p.c, p.d, p.e))
        h = 0.9 * s.h + s.h.mean() + y
        return {"h": h}, h

    model = Step(f, dict.fromkeys("abcde", (3, 4)), {"h": 4})
    with pytest.warns(UserWarning, match="And 3 more") as found:
        compile_etrace_graph(model, jnp.ones(3))
    compile_etrace_graph(model, jnp.ones(3))  # would be an error if it warned again
    assert len(found) == 1
    first, second, third = str(found[0].message).splitlines()[1:4]
    assert "Positions of `h` reach other positions" in first
    assert "`a`" in second
    assert "`b`" in third


def test_a_parameter_without_a_mark_is_told_first():
    def f(p, s, x):
        h = 0.9 * s.h + jax.nn.softmax(bt.matmul(x, p.w)) + p.b
        return {"h": h}, h

    with pytest.warns(UserWarning, match=r"1\. `b`, used by `add`.*feeds `h` without a marked op") as found:
        compile_etrace_graph(Step(f, {"w": (3, 4), "b": 4}, {"h": 4}), jnp.ones(3))
    assert points_at(str(found[0].message), "test_graph.py", "+ p.b")


def warnings_of(f, params, states, x=(3,), **more):
    """The model's findings that are warnings, and the verdict on it."""
    with warnings.catch_warnings(action="ignore"):
        graph = compile_etrace_graph(Step(f, params, {**states, **more}), jnp.ones(x))
    return [r.message for r in graph.diagnostics if r.level is DiagnosticLevel.WARNING], graph.exactness()


def test_a_use_without_a_mark_beside_a_marked_one():
    def f(p, s, x):
        h = 0.9 * s.h + bt.matmul(x, p.w, p.b) + jnp.tanh(p.b)
        return {"h": h}, h

    (message,), verdict = warnings_of(f, {"w": (3, 4), "b": 4}, {"h": 4})
    assert "`b`, used by `tanh`" in message
    assert points_at(message, "test_graph.py", "jnp.tanh(p.b)")
    assert "this use gets the gradient within the step only (the marked one is learned online)" in message
    assert list(verdict.weights) == [("b",)]


def test_indices_that_are_not_known_are_said_to_be_so():
    def f(p, s, x):
        y = bt.matmul(x, p.w)
        return {"h": 0.9 * s.h + y[jnp.argsort(y)]}, s.h

    (message,), _ = warnings_of(f, {"w": (3, 4)}, {"h": 4})
    assert "`gather` at" in message
    assert "goes by indices that are known only as it runs" in message
    assert "mixes" not in message


def test_a_clock_is_no_reason_to_warn():
    def f(p, s, x):
        t = s.t + 0.1
        return {"t": t, "h": 0.9 * s.h + bt.matmul(x, p.w) * jnp.sin(t)}, s.h

    found, verdict = warnings_of(f, {"w": (3, 4)}, {"h": 4, "t": ()})
    assert verdict.exact
    assert found == []


@pytest.mark.parametrize("product", [bt.matmul, jnp.matmul])
def test_a_layer_times_zero_drops_nothing_until_it_is_not_zero(product):
    gain = 0.0

    def f(p, s, x):
        h = 0.9 * s.h + bt.matmul(x, p.w) + gain * product(s.h, p.u)
        return {"h": h}, h

    model = Step(f, {"w": (3, 4), "u": (4, 4)}, {"h": 4})
    learner = bt.D_RTRL(model)
    learner.compile_graph(jnp.ones(3))  # no warning
    assert learner.report.exactness.exact
    gain = 0.5
    if product is bt.matmul:
        with pytest.raises(CompilationError, match="has become another program"):
            learner(jnp.ones(3))
    else:  # it needs no other traces
        with pytest.warns(UserWarning, match="`u`, used by `dot_general`"):
            learner(jnp.ones(3))
        assert not learner.report.exactness.exact


@pytest.mark.filterwarnings("ignore:Step")
def test_samples_that_share_a_weight_are_no_delay_line():
    def f(p, s, x):
        h = jnp.tanh(x @ bt.element_wise(p.w) + bt.matmul(s.h, p.r))
        return {"h": h}, h

    model = Step(f, {"w": (3, 4), "r": (4, 4)}, {"h": (2, 4)})
    learner = bt.D_RTRL(model, window=2, rank=1)
    learner.compile_graph(jnp.ones((2, 3)))
    assert [h.axis for g in learner.graph.hidden_groups for h in g.hidden] == [None]
    assert not learner.report.exactness.exact


def test_pairs_that_are_rotated_get_a_hint_that_helps():
    def f(p, s, x):
        h = s.h @ jnp.asarray([[0.8, 0.6], [-0.6, 0.8]], s.h.dtype) + bt.matmul(x, p.w).reshape(4, 2)
        return {"h": h}, h

    (message,), verdict = warnings_of(f, {"w": (3, 8)}, {"h": (4, 2)})
    assert "Only the 2 numbers along the last axis reach each other" in message
    assert "HiddenGroupState" in message
    assert not verdict.exact
    group = lambda draw: brainstate.HiddenGroupState(draw((4, 2)))
    found, verdict = warnings_of(f, {"w": (3, 8)}, {"h": group})
    assert found == []
    assert verdict.exact

    def stacked(p, s, x):  # read and written entry by entry: each is a state of its own
        a, b = s.h[:, 0], s.h[:, 1]
        h = jnp.stack([0.8 * a - 0.6 * b, 0.6 * a + 0.8 * b], -1) + bt.matmul(x, p.w).reshape(4, 2)
        return {"h": h}, h

    found, verdict = warnings_of(stacked, {"w": (3, 8)}, {"h": (4, 2)})
    assert found == []
    assert verdict.exact

    def g(p, s, x):  # units of a batch, and a weight without a mark: no pairs
        h = jnp.tanh(s.h @ p.u + bt.matmul(x, p.w))
        return {"h": h}, h

    found, _ = warnings_of(g, {"w": (3, 4), "u": (4, 4)}, {"h": (2, 4)}, x=(2, 3))
    assert "HiddenGroupState" not in " ".join(found)


def test_states_outside_the_model_have_names():
    def f(p, s, x):
        h = 0.9 * s.h + bt.matmul(x, p.w) * brainstate.random.rand(4)
        return {"h": h}, h

    report = bt.CompilationReport(compile_etrace_graph(Step(f, {"w": (3, 4)}, {"h": 4}), jnp.ones(3)))
    assert report.dynamic_states == [("brainstate.random.DEFAULT",)]


def test_layers_of_brainstate_are_told_with_their_marked_namesakes():
    class Net(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.readout = brainstate.nn.GRUCell(3, 4), brainstate.nn.Linear(4, 2)

        def update(self, x):
            return self.readout(self.cell(x))

    for make, where in ((Net, "`cell`"), (lambda: brainstate.nn.GRUCell(3, 4), "the model")):
        with jax.numpy_rank_promotion("allow"):
            model = make()
        brainstate.nn.init_all_states(model)
        with pytest.warns(UserWarning, match="has no marked op") as found:
            compile_etrace_graph(model, jnp.ones(3))
        first = str(found[0].message).splitlines()[1]
        assert first.endswith(f"Use `braintrace.nn.GRUCell` instead of `brainstate.nn.GRUCell` for {where}.")
        assert "site-packages" not in first
        assert found[0].filename == __file__


def test_a_cascade_is_told_with_its_line():
    graph = graph_of("cascade_summed")
    (record,) = [r for r in graph.diagnostics if r.kind is DiagnosticKind.HIDDEN_STATE_CASCADE]
    assert points_at(record.message, "zoo.py", "jnp.tanh(a).sum()")


def test_a_cell_of_the_library_has_lines_too():
    with jax.numpy_rank_promotion("allow"):
        cell = bt.nn.GRUCell(3, 4)
        brainstate.nn.init_all_states(cell)
        graph = compile_etrace_graph(cell, jnp.ones(3))
    assert all("cells.py:" in r.message for r in graph.diagnostics)


# -- the same every time, and quickly ------------------------------------------------------------------


def description(names: list[str]) -> str:
    """All that the compiler says about some models, in words."""
    lines = []
    for name in names:
        graph = graph_of(name)
        lines += [f"== {name}", graph.explain(), *(f"{r.kind} {r}" for r in graph.diagnostics)]
        lines += [repr(r.trainable_vars) + repr(r.y_var) for r in graph.hidden_param_op_relations]
        lines += [repr(g.hidden_outvars) + str(g.transition_jaxpr) for g in graph.hidden_groups]
    return "\n".join(lines)


@pytest.mark.slow
def test_same_graph_in_another_process():
    names = sorted(CASES)[::4]
    code = (
        "import tests.conftest\n"
        "from tests.compiler.test_graph import description\n"
        f"print(description({names!r}))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "123"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip() == description(names).rstrip()


class GRU(brainstate.nn.Module):
    def __init__(self, size: int, draw: Draw) -> None:
        super().__init__()
        shapes = {"weight": (2 * size, size), "bias": size}
        self.wz, self.wr, self.wh = (brainstate.ParamState(draw(shapes)) for _ in range(3))
        self.h = brainstate.HiddenState(draw((16, size)))

    def update(self, x):
        h = self.h.value
        product = lambda x, w: bt.matmul(x, w.value["weight"], w.value["bias"])
        xh = jnp.concatenate([x, h], -1)
        z, r = jax.nn.sigmoid(product(xh, self.wz)), jax.nn.sigmoid(product(xh, self.wr))
        new = jnp.tanh(product(jnp.concatenate([x, r * h], -1), self.wh))
        self.h.value = (1 - z) * h + z * new
        return self.h.value


class Layers(brainstate.nn.Module):
    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = list(layers)

    def update(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_thirty_layers_compile_in_half_a_second():
    draw = Draw(np.random.RandomState(0))
    model, x = Layers(GRU(32, draw) for _ in range(30)), draw((16, 32))
    graph = compile_etrace_graph(model, x)
    assert len(graph.hidden_groups) == 30
    assert len(graph.hidden_param_op_relations) == 60
    times = []
    for _ in range(3):
        start = time.process_time()  # other processes do not count
        compile_etrace_graph(model, x)
        times.append(time.process_time() - start)
    assert min(times) < 0.5
