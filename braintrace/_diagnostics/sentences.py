"""The sentence of each finding of the compiler, as a `CompilationRecord`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .._compiler.delays import LONGEST
from .._compiler.findings import Finding, Found, Use
from .._compiler.program import Node
from .._compiler.step import Step, show_path, show_paths
from .._lines import is_users
from .records import KIND_OF, CompilationRecord, DiagnosticLevel
from .records import DiagnosticKind as Kind
from .verdict import dropped_path

INFO, WARNING = DiagnosticLevel.INFO, DiagnosticLevel.WARNING

_MIXED = (
    "Between {use} and {states}, {node} {how}; the trace keeps one position for each, and what goes to the "
    "others is learned within the step only."
)
_OTHER_UNITS = (
    "Positions of {states} reach other positions without a marked op{where}; traces keep the diagonal of "
    "that dependence only."
)
_CASCADE = "The state {states} reaches {others} without a marked op, and not unit by unit{where}; "
_UNMARKED = "{params}{used} feeds {states} without a marked op; "

# the kind and level of the record of each finding, and its message
_SENTENCES: dict[Found, tuple[Kind, DiagnosticLevel, str]] = {
    Found.INCLUDED: (
        Kind.RELATION_INCLUDED,
        INFO,
        "{use}{which_was_found} feeds {states} and is learned online.",
    ),
    Found.ALSO_THROUGH_OPS: (
        Kind.RELATION_PARTIAL_PATH,
        INFO,
        "{use} also reaches {states} through another marked op; the trace does not follow that path, which "
        "is learned within the step only.",
    ),
    Found.MIXED_ON_THE_WAY: (
        Kind.RELATION_PARTIAL_PATH,
        WARNING,
        _MIXED.replace("{how}", "mixes positions"),
    ),
    Found.INDEXED_ON_THE_WAY: (
        Kind.RELATION_PARTIAL_PATH,
        WARNING,
        _MIXED.replace(
            "{how}",
            "goes by indices that are known only as it runs, so that any position may reach any other",
        ),
    ),
    Found.SEVERAL_LEAVES: (
        Kind.PYTREE_WEIGHT_LEAF_AMBIGUOUS,
        INFO,
        "The {detail} of {op} is made of several leaves of {params}; each gets its share of the gradient.",
    ),
    Found.IN_CONTROL_FLOW: (
        Kind.PRIMITIVE_INSIDE_CONTROL_FLOW,
        INFO,
        "{use} is inside {inside}; it is followed there.",
    ),
    Found.FROZEN: (KIND_OF[Found.FROZEN], INFO, "{use} is frozen by `stop_gradient`, and not learned."),
    Found.NO_PARAMETER: (
        KIND_OF[Found.NO_PARAMETER],
        WARNING,
        "{op} has no `ParamState` behind its weight, so there is nothing to learn there.",
    ),
    Found.CHANGES: (
        KIND_OF[Found.CHANGES],
        WARNING,
        "The weight {of} of {op} also depends on {made_of}, so it changes from step to step and no trace can "
        "be kept for it; it gets the gradient within the step only.",
    ),
    Found.UNKNOWN_INDICES: (
        KIND_OF[Found.UNKNOWN_INDICES],
        WARNING,
        "{use} is inside a `cond` and takes indices, which are not known while the branch is not taken; it "
        "gets the gradient within the step, and no trace. Move the op out of the `cond`.",
    ),
    Found.BEHIND_ANOTHER: (
        KIND_OF[Found.BEHIND_ANOTHER],
        INFO,
        "{use} reaches the state only through another marked op; it gets the gradient within the step, and "
        "no trace.",
    ),
    Found.NO_STATE: (
        KIND_OF[Found.NO_STATE],
        INFO,
        "{use} feeds no hidden state (a readout, say); the gradient within the step is all there is.",
    ),
    Found.NO_POSITION: (
        KIND_OF[Found.NO_POSITION],
        WARNING,
        "The output {shape} of {use} is mixed on its way to {states} {detail} so that no position of it "
        "belongs to one of the state; it gets the gradient within the step, and no trace.",
    ),
    Found.COUPLED: (
        Kind.HIDDEN_GROUP_MERGED,
        INFO,
        "The states {states} are coupled unit by unit and form one group.",
    ),
    Found.MIXED_UNITS: (Kind.HIDDEN_STATE_MIXED, WARNING, _OTHER_UNITS),
    Found.MIXED_PAIRS: (
        Kind.HIDDEN_STATE_MIXED,
        WARNING,
        f"{_OTHER_UNITS} Only the {{detail}} numbers along the last axis reach each other: in a "
        "`brainstate.HiddenGroupState`, or as {detail} leaves of a function's carry, they belong to one "
        "unit, and traces follow all of them.",
    ),
    Found.THROUGH_WHILE: (
        Kind.PRIMITIVE_INSIDE_CONTROL_FLOW,
        INFO,
        "The states {states} go through a `while` loop, which has no reverse mode: local Jacobians are taken "
        "forwards, and nothing else is learned through the loop.",
    ),
    Found.CASCADE: (
        Kind.HIDDEN_STATE_CASCADE,
        WARNING,
        _CASCADE + "what is learned through {states} does not count what {others} remembers of it.",
    ),
    Found.UNLEARNED_CASCADE: (
        Kind.HIDDEN_STATE_CASCADE,
        INFO,
        _CASCADE + "no marked op feeds {states}, so that no trace misses it.",
    ),
    Found.NEVER_READ: (
        Kind.STATE_MISMATCH,
        WARNING,
        "The step writes {states} and never reads it, nor another hidden state: no step depends on earlier "
        "ones, and all that is learned is learned within a step.",
    ),
    Found.NO_MARKED_OP: (
        Kind.NO_MARKED_OP,
        WARNING,
        "The model has no marked op, so no weight is learned online (parameters: {uses}); each gets the "
        "gradient within the step only. {advice}",
    ),
    Found.WITHOUT_MARK: (
        Kind.PARAMETER_WITHOUT_MARK,
        WARNING,
        _UNMARKED + "it gets the gradient within the step only. {advice}",
    ),
    Found.ALSO_WITHOUT_MARK: (
        Kind.PARAMETER_WITHOUT_MARK,
        WARNING,
        _UNMARKED + "this use gets the gradient within the step only (the marked one is learned online). "
        "{advice}",
    ),
    Found.OWN_DERIVATIVE_UNUSED: (
        Kind.PRIMITIVE_INSIDE_NESTED_JIT,
        WARNING,
        "A function with a derivative rule of its own{where} holds a marked op; it is read through, and its "
        "own rule is not used. Move the op out of the function.",
    ),
    Found.RULE_NOT_LINEAR: (
        Kind.RULE_NOT_LINEAR,
        WARNING,
        "The function called at {line} has a derivative rule (`custom_vjp`) that is not linear in the "
        "gradient it is given, as clipping is not, or whose program does not show it, as a callback does "
        "not. BPTT gives it the sum of what the losses of all steps send back; no online rule can: if it is "
        "not linear, the gradient of {params} is approximate. Clip the gradients of parameters instead, or "
        "train with `braintrace.BPTT`.",
    ),
    Found.STATE_WITHOUT_TRACE: (
        Kind.STATE_WITHOUT_TRACE,
        WARNING,
        "Losses depend on what {params} did in earlier steps through {states} ({detail}), which has "
        "no trace: that part of the gradient is missing, which may be all of it. A delay line of up to "
        f"{LONGEST} places has traces by itself. Keep anything else in a hidden state "
        "(`brainstate.HiddenState`, a leaf of a function's carry) that is updated unit by unit, or train by"
        " `braintrace.RTRL`; in windows (`vjp_method='multi-step'`), what stays in one counts.",
    ),
    Found.NO_GRADIENT: (
        Kind.GRADIENT_IS_ZERO,
        WARNING,
        "Step by step, the gradient of {params} is zero: it acts on losses of later steps only, and not "
        "counted is {reason}. Let what comes after read the states as the step leaves them, not as it finds "
        "them, or train with `braintrace.RTRL` or in windows (`vjp_method='multi-step'`).",
    ),
}
_ADVICE = {  # if the front end has none that is more specific
    Found.NO_MARKED_OP: "Use `braintrace.matmul(x, w)` instead of `x @ w`, the layers of `braintrace.nn`, or "
    "`mark='auto'`.",
    Found.WITHOUT_MARK: "Use `braintrace.matmul(x, w, b)`, `braintrace.element_wise(w)` or a layer of "
    "`braintrace.nn` to learn it online.",
}
_ADVICE[Found.ALSO_WITHOUT_MARK] = _ADVICE[Found.WITHOUT_MARK]
_CAN_BE_FOUND = (
    "Marks are found where a parameter enters by a product, a convolution, a lookup of rows or element by "
    "element, outside of `while` loops and of functions with a derivative rule of their own."
)


def records(findings: Iterable[Finding], step: Step) -> list[CompilationRecord]:
    """A record for each finding, equal ones once with a count.

    That a gradient is zero is left out where another warning names the weight.
    """
    each = [record(finding, step) for finding in findings]
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


def record(f: Finding, step: Step) -> CompilationRecord:
    """The record of one finding of compiling a step."""
    kind, level, sentence = _SENTENCES[f.kind]
    message = sentence.format_map(_words(f, step))
    context: dict[str, Any] = {"sources": [n.source for n in f.nodes]} if f.nodes else {}
    primitive, weight, paths = None, next(iter(f.params), None), f.states
    if isinstance(f.of, Use):
        site = f.of.site
        primitive, weight = site.primitive, next(iter(f.params or f.of.params), None)
        context |= {"found": site.found, "context": site.context, "loops": site.loops}
    elif f.nodes:
        primitive = f.nodes[0].primitive
    if f.kind in (Found.RULE_NOT_LINEAR, Found.STATE_WITHOUT_TRACE):
        context["weight_paths"] = list(f.params)
    if f.kind in (Found.CASCADE, Found.UNLEARNED_CASCADE):
        paths = (*paths, *f.detail)
    return CompilationRecord(kind, level, message, primitive, weight, paths, context)


def _words(f: Finding, step: Step) -> dict[str, Any]:
    """The words for the places in a sentence."""
    node = next(iter(f.nodes), None)
    words: dict[str, Any] = {"params": show_paths(f.params), "states": show_paths(f.states)}
    words |= {"detail": f.detail, "node": "the step"}
    if node is not None:
        named = f"`{node.primitive.name}` at {node.source}"
        words |= {"node": named, "where": f" ({named})", "line": node.source}
    words |= {"used": f"{_used(node)}," if _used(node) else ""}
    if isinstance(f.of, Use):
        site = f.of.site
        words |= {"use": f.of, "of": f.of.of, "op": f"`{site.primitive.name}` at {site.source}"}
        words |= {"shape": tuple(site.shape), "inside": ", ".join(f"`{name}`" for name in site.context)}
        words |= {"which_was_found": ", which was found," * site.found}
    if f.kind is Found.CHANGES:
        made_of = dict.fromkeys(f"the state `{show_path(p)}`" if p else "the input" for p in f.detail)
        words["made_of"] = ", ".join(made_of) or "a value that a loop carries"
    if f.kind in (Found.CASCADE, Found.UNLEARNED_CASCADE):
        words["others"] = show_paths(f.detail)
    if f.kind is Found.NO_GRADIENT:
        words["reason"] = dropped_path(f.detail).reason
    if f.kind is Found.NO_MARKED_OP:
        words["uses"] = ", ".join(f"`{show_path(p)}`{_used(n)}" for p, n in f.detail) or "none"
    if f.kind in _ADVICE:
        found = _CAN_BE_FOUND if step.found else step.unmarked(f.params)
        words["advice"] = found or _ADVICE[f.kind]
    return defaultdict(str, words)


def _used(node: Node | None) -> str:
    # of a layer of a library the advice says more than the line
    return f", used by `{node.primitive.name}` at {node.source}" if node and is_users(node.source) else ""
