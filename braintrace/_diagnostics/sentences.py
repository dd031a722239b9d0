"""The sentence of each outcome of the compiler, as a `CompilationRecord`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from .._compiler import outcomes as found
from .._compiler.delays import LONGEST
from .._compiler.outcomes import Outcome, Use, WhyNot
from .._compiler.program import Node
from .._compiler.step import Path, Step, show_path, show_paths
from .._lines import is_users
from .records import KIND_OF, CompilationRecord, DiagnosticLevel
from .records import DiagnosticKind as Kind
from .verdict import dropped_path

INFO, WARNING = DiagnosticLevel.INFO, DiagnosticLevel.WARNING


def records(outcomes: Iterable[Outcome], step: Step) -> list[CompilationRecord]:
    """A record for each outcome, equal ones once with a count.

    That a gradient is zero is left out where another warning names the weight.
    """
    each = [record(outcome, step) for outcome in outcomes]
    times = Counter(r.message for r in each)
    first = {r.message: r for r in reversed(each)}
    said = [
        replace(r, message=f"{r.message} ({times[r.message]} times)") if times[r.message] > 1 else r
        for r in each
        if r is first[r.message]
    ]
    others = [r for r in said if r.level >= WARNING and r.kind is not Kind.GRADIENT_IS_ZERO]
    named = {p for r in others for p in (r.weight_path, *r.context.get("weight_paths", ()))}
    return [r for r in said if r.kind is not Kind.GRADIENT_IS_ZERO or r.weight_path not in named]


def record(o: Outcome, step: Step) -> CompilationRecord:
    """The record of one outcome of compiling a step."""
    made = _of_op(o) or _of_group(o) or _of_parameter(o, step)
    if made is None:
        raise TypeError(f"No sentence for {o!r}.")
    return made


def _of_op(o: Outcome) -> CompilationRecord | None:
    """The record of an outcome about a marked op."""
    match o:
        case found.NoTrace():
            return _no_trace(o)
        case found.Included(use, paths):
            how = ", which was found," * use.site.found
            message = f"{use}{how} feeds {show_paths(paths)} and is learned online."
            return _of_site(Kind.RELATION_INCLUDED, INFO, message, use, paths, found=use.site.found)
        case found.AlsoThroughOps(use, paths):
            message = (
                f"{use} also reaches {show_paths(paths)} through another marked op; the trace does not "
                "follow that path, which is learned within the step only."
            )
            return _of_site(Kind.RELATION_PARTIAL_PATH, INFO, message, use, paths)
        case found.KeepsOnePosition(use, group, nodes, by_indices):
            where = f"`{nodes[0].primitive.name}` at {nodes[0].source}" if nodes else "the step"
            known = "goes by indices that are known only as it runs, so that any position may reach any other"
            message = (
                f"Between {use} and {show_paths(group.hidden_paths)}, {where} "
                f"{known if by_indices else 'mixes positions'}; the trace keeps one position for each, and "
                "what goes to the others is learned within the step only."
            )
            lines = [n.source for n in nodes]
            kind, paths = Kind.RELATION_PARTIAL_PATH, tuple(group.hidden_paths)
            return _of_site(kind, WARNING, message, use, paths, sources=lines)
        case found.SeveralLeaves(use, name, params):
            message = (
                f"The {name} of `{use.site.primitive.name}` at {use.site.source} is made of several leaves "
                f"of {show_paths(params)}; each gets its share of the gradient."
            )
            return _of_site(Kind.PYTREE_WEIGHT_LEAF_AMBIGUOUS, INFO, message, Use(use.site, params))
        case found.InControlFlow(use):
            inside, loops = use.site.context, use.site.loops
            message = f"{use} is inside `{'`, `'.join(inside)}`; it is followed there."
            kind = Kind.PRIMITIVE_INSIDE_CONTROL_FLOW
            return _of_site(kind, INFO, message, use, context=inside, loops=loops)
        case found.OwnDerivativeUnused(node):
            message = (
                f"A function with a derivative rule of its own{_where([node])} holds a marked op; it is read "
                "through, and its own rule is not used. Move the op out of the function."
            )
            return CompilationRecord(Kind.PRIMITIVE_INSIDE_NESTED_JIT, WARNING, message, node.primitive)
    return None


def _of_group(o: Outcome) -> CompilationRecord | None:
    """The record of an outcome about hidden states."""
    match o:
        case found.Coupled(group):
            message = (
                f"The states {show_paths(group.hidden_paths)} are coupled unit by unit and form one group."
            )
            return _of_states(Kind.HIDDEN_GROUP_MERGED, INFO, message, group.hidden_paths)
        case found.MixedUnits(group, width):
            hint = (
                f" Only the {width} numbers along the last axis reach each other: in a "
                f"`brainstate.HiddenGroupState`, or as {width} leaves of a function's carry, they belong to "
                "one unit, and traces follow all of them."
            )
            message = (
                f"Positions of {show_paths(group.hidden_paths)} reach other positions without a marked op"
                f"{_where(group.mixers)}; traces keep the diagonal of that dependence only."
                f"{hint if width else ''}"
            )
            return _of_states(Kind.HIDDEN_STATE_MIXED, WARNING, message, group.hidden_paths, group.mixers)
        case found.ThroughWhile(group):
            message = (
                f"The states {show_paths(group.hidden_paths)} go through a `while` loop, which has no "
                "reverse mode: local Jacobians are taken forwards, and nothing else is learned through "
                "the loop."
            )
            return _of_states(Kind.PRIMITIVE_INSIDE_CONTROL_FLOW, INFO, message, group.hidden_paths)
        case found.Cascade(group, other, node, learned):
            nodes = (node,) if node else ()
            names, others = show_paths(group.hidden_paths), show_paths(other.hidden_paths)
            message = (
                f"The state {names} reaches {others} without a marked op, and not unit by unit"
                f"{_where(nodes)}; "
            ) + (
                f"what is learned through {names} does not count what {others} remembers of it."
                if learned
                else f"no marked op feeds {names}, so that no trace misses it."
            )
            paths = (*group.hidden_paths, *other.hidden_paths)
            return _of_states(Kind.HIDDEN_STATE_CASCADE, WARNING if learned else INFO, message, paths, nodes)
        case found.NeverRead(paths):
            message = (
                f"The step writes {show_paths(paths)} and never reads it, nor another hidden state: no step "
                "depends on earlier ones, and all that is learned is learned within a step."
            )
            return _of_states(Kind.STATE_MISMATCH, WARNING, message, paths)
    return None


def _of_parameter(o: Outcome, step: Step) -> CompilationRecord | None:
    """The record of an outcome about the gradient of parameters."""
    match o:
        case found.NoMarkedOp(params, feeding):
            names = ", ".join(f"`{show_path(p)}`{_used(node)}" for p, node in params) or "none"
            advice = (
                "Use `braintrace.matmul(x, w)` instead of `x @ w`, the layers of `braintrace.nn`, or "
                "`mark='auto'`."
            )
            message = (
                f"The model has no marked op, so no weight is learned online (parameters: {names}); each "
                f"gets the gradient within the step only. {_advice(step, feeding, advice)}"
            )
            return CompilationRecord(Kind.NO_MARKED_OP, WARNING, message)
        case found.WithoutMark(path, paths, node, marked):
            used = f"{_used(node)}," if _used(node) else ""
            gets = (
                "this use gets the gradient within the step only (the marked one is learned online)"
                if marked
                else "it gets the gradient within the step only"
            )
            advice = (
                "Use `braintrace.matmul(x, w, b)`, `braintrace.element_wise(w)` or a layer of "
                "`braintrace.nn` to learn it online."
            )
            message = (
                f"`{show_path(path)}`{used} feeds {show_paths(paths)} without a marked op; {gets}. "
                f"{_advice(step, [path], advice)}"
            )
            return CompilationRecord(Kind.PARAMETER_WITHOUT_MARK, WARNING, message, None, path, paths)
        case found.NotLinear(node, params):
            message = (
                f"The function called at {node.source} has a derivative rule (`custom_vjp`) that is not "
                "linear in the gradient it is given, as clipping is not, or whose program does not show it, "
                "as a callback does not. BPTT gives it the sum of what the losses of all steps send back; no "
                f"online rule can: if it is not linear, the gradient of {show_paths(params)} is approximate. "
                "Clip the gradients of parameters instead, or train with `braintrace.BPTT`."
            )
            more = {"sources": [node.source], "weight_paths": list(params)}
            return CompilationRecord(Kind.RULE_NOT_LINEAR, WARNING, message, node.primitive, context=more)
        case found.StateWithoutTrace(state, params):
            message = (
                f"Losses depend on what {show_paths(params)} did in earlier steps through "
                f"`{show_path(state.path)}` ({state.kind}), which has no trace: that part of the gradient is "
                f"missing, which may be all of it. A delay line of up to {LONGEST} places has traces by "
                "itself. Keep anything else in a hidden state (`brainstate.HiddenState`, a leaf of a "
                "function's carry) that is updated unit by unit, or train by `braintrace.RTRL`; in windows "
                "(`vjp_method='multi-step'`), what stays in one counts."
            )
            kind, paths, more = Kind.STATE_WITHOUT_TRACE, (state.path,), {"weight_paths": list(params)}
            return CompilationRecord(kind, WARNING, message, None, params[0], paths, more)
        case found.NoGradient(path, dropped):
            message = (
                f"Step by step, the gradient of `{show_path(path)}` is zero: it acts on losses of later "
                f"steps only, and not counted is {dropped_path(dropped).reason}. Let what comes after read "
                "the states as the step leaves them, not as it finds them, or train with `braintrace.RTRL` "
                "or in windows (`vjp_method='multi-step'`)."
            )
            return CompilationRecord(Kind.GRADIENT_IS_ZERO, WARNING, message, weight_path=path)
    return None


def _no_trace(o: found.NoTrace) -> CompilationRecord:
    use, site = o.use, o.use.site
    op = f"`{site.primitive.name}` at {site.source}"
    made_of = [f"the state `{show_path(p)}`" if p else "the input" for p in o.made_of]
    paths = tuple(o.group.hidden_paths) if o.group else ()
    quiet = o.why in (WhyNot.FROZEN, WhyNot.BEHIND_ANOTHER, WhyNot.NO_STATE)
    message = {
        WhyNot.FROZEN: f"{use} is frozen by `stop_gradient`, and not learned.",
        WhyNot.NO_PARAMETER: (
            f"{op} has no `ParamState` behind its weight, so there is nothing to learn there."
        ),
        WhyNot.CHANGES: (
            f"The weight {use.of} of {op} also depends on "
            f"{', '.join(dict.fromkeys(made_of)) or 'a value that a loop carries'}, so it changes from step "
            "to step and no trace can be kept for it; it gets the gradient within the step only."
        ),
        WhyNot.UNKNOWN_INDICES: (
            f"{use} is inside a `cond` and takes indices, which are not known while the branch is not taken; "
            "it gets the gradient within the step, and no trace. Move the op out of the `cond`."
        ),
        WhyNot.BEHIND_ANOTHER: (
            f"{use} reaches the state only through another marked op; it gets the gradient within the step, "
            "and no trace."
        ),
        WhyNot.NO_STATE: (
            f"{use} feeds no hidden state (a readout, say); the gradient within the step is all there is."
        ),
        WhyNot.NO_POSITION: (
            f"The output {tuple(site.shape)} of {use} is mixed on its way to {show_paths(paths)} "
            f"{tuple(o.group.varshape) if o.group else ''} so that no position of it belongs to one of the "
            "state; it gets the gradient within the step, and no trace."
        ),
    }[o.why]
    return _of_site(KIND_OF[o.why], INFO if quiet else WARNING, message, use, paths)


def _of_site(
    kind: Kind, level: DiagnosticLevel, message: str, use: Use, paths: tuple[Path, ...] = (), **context: Any
) -> CompilationRecord:
    weight = next(iter(use.params), None)
    return CompilationRecord(kind, level, message, use.site.primitive, weight, paths, context)


def _of_states(
    kind: Kind,
    level: DiagnosticLevel,
    message: str,
    paths: Sequence[Path],
    nodes: Sequence[Node] | None = None,
) -> CompilationRecord:
    context = {} if nodes is None else {"sources": [n.source for n in nodes]}
    primitive = nodes[0].primitive if nodes else None
    return CompilationRecord(kind, level, message, primitive, None, tuple(paths), context)


def _where(nodes: Sequence[Node]) -> str:
    return f" (`{nodes[0].primitive.name}` at {nodes[0].source})" if nodes else ""


_CAN_BE_FOUND = (
    "Marks are found where a parameter enters by a product, a convolution, a lookup of rows or element by "
    "element, outside of `while` loops and of functions with a derivative rule of their own."
)


def _advice(step: Step, params: Sequence[Path], otherwise: str) -> str:
    """Advice for parameters that enter without a marked op."""
    return _CAN_BE_FOUND if step.found else step.unmarked(params) or otherwise


def _used(node: Node | None) -> str:
    # of a layer of a library the advice says more than the line
    return f", used by `{node.primitive.name}` at {node.source}" if node and is_users(node.source) else ""
