"""Warnings of what a user's step does outside of the model, where traces do not follow."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial

from .._compiler.custom_derivatives import PullBack
from .._compiler.dataflow import Flow, solve, union
from .._compiler.module_info import ModuleInfo
from .._compiler.program import Atom, Node, Program, Var
from .._compiler.slices import behind, dependents, needed
from .._compiler.step import Path, show_path, show_paths
from .._executor.executor import masks_of_weights
from .._lines import warn_user
from .._online.call import call_p
from .._online.drive import Drive
from .._online.user_step import UserStep, variables
from .._rules.rule import TraceRule


def warn_of_paths(drive: Drive, weights: Sequence[int], outside: Sequence[int], about: object) -> None:
    """Warn of paths through time that a gradient in steps, chunks or windows leaves out.

    `weights` are the leaves whose gradient is asked for, and `outside` those of them that the model, `about`,
    does not hold.
    """
    step, warn = drive.step, partial(warn_user, about=about)
    params: dict[Path, list[Var]] = {}
    for i in weights:
        params.setdefault((step.names[i],), []).append(step.leaves[i])
    results = [*step.outs, *(step.new[i] for i in step.moving)]
    warn_of_no_effect(_unused(step.program, results, params), about)
    if not step.calls:
        return
    in_windows = drive.mode == "windows"
    before = "before the window" if in_windows else "in earlier steps"
    if step.node is not None:
        _warn_of_assigned(step, about)
    # a weight that a step updates is a new one for the next step, not a state
    carried = [i for i in _carried(step) if i not in step.carried and i not in weights]
    reached = _reached_by(step, outside)
    if reached:
        warn(
            f"{_names(step, reached)} act through a state that the step carries on, but are not the model's: "
            f"their gradient is that within {'a window' if in_windows else 'the step'} only. Make them "
            "part of the model that the learner is given, or train them by BPTT.",
        )
    lost = _lost(step, carried, weights)
    if lost:
        warn(
            f"`step_fn` carries {_names(step, lost)} from step to step and its loss reads it: what "
            f"parameters did to it {before} is not in the gradient. Make it a hidden state of the model.",
        )
    fed = _fed(step, [i for i in step.carried if i is not None])
    if fed:
        warn(
            f"`step_fn` feeds {_names(step, fed)} back into the model as an argument: traces do not "
            "follow that path through time. Read the state inside of the model.",
        )
    used = [i for i in _fed(step, weights) if i not in reached] if _carried(step) else []
    if used and not fed:  # else by way of them, too
        warn(
            f"`step_fn` makes an argument of the model with {_names(step, used)}: what that does to states "
            f"is in the gradient of {'its window' if in_windows else 'the same step'} only. Do it in the "
            "model's `update`, or train by BPTT.",
        )
    forgotten = _forgotten(step) if step.node is not None else []
    if forgotten:
        warn(
            f"The loss reads {_names(step, forgotten)}, which the model carries from step to step without a "
            f"trace: what parameters did to it {before} is not in the gradient. Make it a `ShortTermState`, "
            "or train by `RTRL`.",
        )
    if in_windows:
        return
    read = [i for i in step.carried if i is not None and i in step.read_otherwise]
    if read and drive.mode != "chunks" and not drive.old_leaves:
        warn(
            "`step_fn` reads a hidden state before it calls the learner, and not just once or inside of a "
            "transformation: what parameters did to that state in earlier steps is not in the gradient. Call "
            "the learner once, at the top of `step_fn`.",
        )
        return
    untraced = [i for i in read if i in _without_trace(step)]
    if untraced:
        warn(
            f"The loss reads {_names(step, untraced)} as it was before the call of the learner. It has no "
            "trace of its own, as only marked ops read it in the model or as it is a leaky readout: what "
            "parameters did to it in earlier steps is not in the gradient. Return the old value from the "
            "model's `update`, or use `vjp_method='multi-step'`.",
        )


def warn_of_no_effect(paths: list[Path], about: object = None) -> None:
    """Warn of parameters whose gradient is zero, because nothing that a step computes depends on them."""
    if paths:
        warn_user(
            f"No output and no state of a step depends on {show_paths(paths)}: the gradient is zero. A reset "
            "or an initial carry that is made of a parameter is a constant to the learner; a learned initial "
            "state is used in the step: `h = jnp.where(first, h0, h)`, with a flag `first` among the inputs.",
            about=about,
        )


def unused_parameters(info: ModuleInfo) -> list[Path]:
    """The parameters that no output or new state of the model's step depends on."""
    return _unused(info.program, _results(info), {e.path: e.invars for e in info.params})


def frozen_parameters(info: ModuleInfo) -> list[Path]:
    """The parameters from which no derivative leads to an output or a new state, as by `stop_gradient`."""
    flow = Flow[bool](back=True, derivatives=True, enters=True, rule=PullBack.of)
    reached = solve(flow, info.program, ((a, True) for a in _results(info)))[0]
    return [e.path for e in info.params if not any(v in reached for v in e.invars)]


def _results(info: ModuleInfo) -> list[Atom]:
    """The outputs and new states of the model's step."""
    return [*info.out_atoms, *(a for e in info.carried for a in e.outvars)]


def _unused(program: Program, results: Iterable[Atom], params: Mapping[Path, Sequence[Var]]) -> list[Path]:
    reached = behind(program, results)
    inexact = {k: [v for v in vs if v.inexact] for k, vs in params.items()}
    return [k for k, vs in inexact.items() if vs and reached.isdisjoint(vs)]


def _names(step: UserStep, leaves: Iterable[int]) -> str:
    return ", ".join(dict.fromkeys(f"`{step.names[i]}`" for i in leaves))


def _warn_of_assigned(step: UserStep, about: object) -> None:
    assert step.node is not None
    fixed, _, _, rest, values = step.operands
    _, new, after = step.results
    if any(values[k] is not step.leaves[i] or step.new[i] is not after[k] for k, i in step.traces.items()):
        return  # whoever sets the traces as well knows what they do
    before = [a for leaves in rest for a in leaves]
    later = [a for leaves in new for a in leaves]
    carried = [v for e in step.rule_step.info.carried for v in e.invars]
    hidden = {h.leaf for h in step.rule_step.info.hidden}
    assigned = [
        i
        for v, i, a, b in zip(carried, step.carried, before, later, strict=True)
        if v in hidden and i is not None and (a is not step.leaves[i] or step.new[i] is not b)
    ]
    names = [step.names[i] for i in assigned]
    leaves = {step.leaves[i] for i in range(len(step.leaves)) if i not in step.moving}
    of_masks = {v: e for e in masks_of_weights(step.rule_step.executor) for v in e.invars}
    inputs = [v for e in step.rule_step.info.fixed for v in e.invars]
    names += [
        show_path(of_masks[v].path)
        for v, a in zip(inputs, fixed, strict=True)
        if v in of_masks and not (isinstance(a, Var) and a in leaves)
    ]
    if names:
        shown = ", ".join(dict.fromkeys(f"`{name}`" for name in names))
        warn_user(
            f"`step_fn` assigns {shown}, beside the model's own step: the traces do not know of it, so "
            "the gradient goes on as if it had not been done. Do it in the model's `update`; or, to "
            "begin a new episode, set the traces back as well (`learner.reset_state()`).",
            about=about,
        )


def _carried(step: UserStep) -> list[int]:
    """The inexact leaves that a step changes, without the rule's arrays."""
    traces = set(step.traces.values())
    return [i for i in step.moving if i not in traces and step.leaves[i].inexact]


def _reached_by(step: UserStep, weights: Sequence[int]) -> list[int]:
    """The weights that a carried leaf depends on."""
    new = variables(step.new[i] for i in _carried(step))
    return [i for i in weights if any(a in dependents(step.program, [step.leaves[i]]) for a in new)]


def _lost(step: UserStep, carried: list[int], weights: Sequence[int]) -> list[int]:
    """The leaves carried outside of the model that depend on a weight and that the loss reads later."""
    moved = [step.leaves[i] for i in weights]
    moved += [step.leaves[i] for i in step.carried if i is not None]
    after = dependents(step.program, moved)
    return [
        i
        for i in carried
        if step.new[i] in after
        and any(step.leaves[i] in n.inputs for n in needed(step.program, step.outs[:1]))
    ]


def _fed(step: UserStep, leaves: Sequence[int]) -> list[int]:
    """The leaves that an argument of a call depends on, wherever the call is."""

    def is_fed(leaf: int) -> bool:
        found: list[bool] = []

        def transfer(node: Node, given: list[bool | None]) -> bool | None:
            if node.primitive is call_p and not node.params["call"].maps:
                found.extend(filter(None, node.params["call"].operands(given)[1]))
            reaches: bool | None = union(given)
            return reaches

        flow = Flow[bool](transfer, derivatives=True, enters=True)
        solve(flow, step.program, [(step.leaves[leaf], True)])
        return bool(found)

    return [i for i in leaves if is_fed(i)]


def _forgotten(step: UserStep) -> list[int]:
    """The states without a trace through which parameters of earlier steps affect the loss."""
    info = step.rule_step.info
    if not isinstance(step.rule_step.rule, TraceRule):
        return []
    hidden = {h.leaf for h in info.hidden}
    sources = [*hidden, *(v for e in info.params for v in e.invars)]
    moved = _depend(info.program, sources)
    found = []
    pairs = [pair for e in info.carried for pair in zip(e.invars, e.outvars, strict=True)]
    for (old, new), leaf in zip(pairs, step.carried, strict=True):
        if old in hidden or new not in moved or leaf is None:
            continue
        remembers = leaf in step.read_after and new in _depend(info.program, [old])
        if leaf in step.read_otherwise or remembers:
            found.append(leaf)
    return found


def _depend(program: Program, sources: list[Var]) -> Container[Var]:
    """The variables that depend on the sources, also across marked ops."""
    return solve(Flow[bool](derivatives=True, enters=True), program, [(v, True) for v in sources])[0]


def _without_trace(step: UserStep) -> set[int | None]:
    """The hidden states whose trace is not of their whole memory: without a group, or with a filter."""
    traced = {v for g in step.rule_step.executor.graph.hidden_groups for v in g.hidden_invars}
    filtered = {h.path[:-1] for h in step.rule_step.info.hidden if h.coefficients}
    hidden = zip(step.rule_step.info.hidden, step.hidden, strict=True)
    return {i for h, i in hidden if h.invar not in traced or h.path in filtered}
