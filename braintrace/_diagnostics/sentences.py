"""The sentence of each finding of the compiler, as a `CompilationRecord`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from .._compat import Primitive
from .._compiler.delays import LONGEST
from .._compiler.findings import Finding, Findings, Found, Use
from .._compiler.program import Node
from .._compiler.step import Step, show_path, show_paths
from .._lines import is_users
from .._types import Options
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

_SENTENCES: dict[Found, str] = {
    Found.INCLUDED: "{use}{which_was_found} feeds {states} and is learned online.",
    Found.ALSO_THROUGH_OPS: (
        "{use} also reaches {states} through another marked op; the trace does not follow that path, which "
        "is learned within the step only."
    ),
    Found.MIXED_ON_THE_WAY: _MIXED.replace("{how}", "mixes positions"),
    Found.INDEXED_ON_THE_WAY: _MIXED.replace(
        "{how}",
        "goes by indices that are known only as it runs, so that any position may reach any other",
    ),
    Found.SEVERAL_LEAVES: (
        "The {detail} of {op} is made of several leaves of {params}; each gets its share of the gradient."
    ),
    Found.IN_CONTROL_FLOW: "{use} is inside {inside}; it is followed there.",
    Found.FROZEN: "{use} is frozen by `stop_gradient`, and not learned.",
    Found.NO_PARAMETER: "{op} has no `ParamState` behind its weight, so there is nothing to learn there.",
    Found.CHANGES: (
        "The weight {of} of {op} also depends on {made_of}, so it changes from step to step and no trace can "
        "be kept for it; it gets the gradient within the step only."
    ),
    Found.UNKNOWN_INDICES: (
        "{use} is inside a `cond` and takes indices, which are not known while the branch is not taken; it "
        "gets the gradient within the step, and no trace. Move the op out of the `cond`."
    ),
    Found.BEHIND_ANOTHER: (
        "{use} reaches the state only through another marked op; it gets the gradient within the step, and "
        "no trace."
    ),
    Found.NO_STATE: (
        "{use} feeds no hidden state (a readout, say); the gradient within the step is all there is."
    ),
    Found.NO_POSITION: (
        "The output {shape} of {use} is mixed on its way to {states} {detail} so that no position of it "
        "belongs to one of the state; it gets the gradient within the step, and no trace."
    ),
    Found.COUPLED: "The states {states} are coupled unit by unit and form one group.",
    Found.MIXED_UNITS: _OTHER_UNITS,
    Found.MIXED_PAIRS: (
        f"{_OTHER_UNITS} Only the {{detail}} numbers along the last axis reach each other: in a "
        "`brainstate.HiddenGroupState`, or as {detail} leaves of a function's carry, they belong to one "
        "unit, and traces follow all of them."
    ),
    Found.THROUGH_WHILE: (
        "The states {states} go through a `while` loop, which has no reverse mode: local Jacobians are taken "
        "forwards, and nothing else is learned through the loop."
    ),
    Found.CASCADE: _CASCADE
    + "what is learned through {states} does not count what {others} remembers of it.",
    Found.UNLEARNED_CASCADE: _CASCADE + "no marked op feeds {states}, so that no trace misses it.",
    Found.NEVER_READ: (
        "The step writes {states} and never reads it, nor another hidden state: no step depends on earlier "
        "ones, and all that is learned is learned within a step."
    ),
    Found.NO_MARKED_OP: (
        "The model has no marked op, so no weight is learned online (parameters: {uses}); each gets the "
        "gradient within the step only. {advice}"
    ),
    Found.WITHOUT_MARK: _UNMARKED + "it gets the gradient within the step only. {advice}",
    Found.ALSO_WITHOUT_MARK: (
        _UNMARKED + "this use gets the gradient within the step only (the marked one is learned online). "
        "{advice}"
    ),
    Found.OWN_DERIVATIVE_UNUSED: (
        "A function with a derivative rule of its own{where} holds a marked op; it is read through, and its "
        "own rule is not used. Move the op out of the function."
    ),
    Found.RULE_NOT_LINEAR: (
        "The function called at {line} has a derivative rule (`custom_vjp`) that is not linear in the "
        "gradient it is given, as clipping is not, or whose program does not show it, as a callback does "
        "not. BPTT gives it the sum of what the losses of all steps send back; no online rule can: if it is "
        "not linear, the gradient of {params} is approximate. Clip the gradients of parameters instead, or "
        "train with `braintrace.BPTT`."
    ),
    Found.STATE_WITHOUT_TRACE: (
        "Losses depend on what {params} did in earlier steps through {states} ({detail}), which has "
        "no trace: that part of the gradient is missing, which may be all of it. A delay line of up to "
        f"{LONGEST} places has traces by itself. Keep anything else in a hidden state "
        "(`brainstate.HiddenState`, a leaf of a function's carry) that is updated unit by unit, or train by"
        " `braintrace.RTRL`; in windows (`vjp_method='multi-step'`), what stays in one counts."
    ),
    Found.NO_GRADIENT: (
        "Step by step, the gradient of {params} is zero: it acts on losses of later steps only, and not "
        "counted is {reason}. Let what comes after read the states as the step leaves them, not as it finds "
        "them, or train with `braintrace.RTRL` or in windows (`vjp_method='multi-step'`)."
    ),
}
_QUIET = {  # findings that need no warning
    Found.INCLUDED,
    Found.ALSO_THROUGH_OPS,
    Found.SEVERAL_LEAVES,
    Found.IN_CONTROL_FLOW,
    Found.FROZEN,
    Found.BEHIND_ANOTHER,
    Found.NO_STATE,
    Found.COUPLED,
    Found.THROUGH_WHILE,
    Found.UNLEARNED_CASCADE,
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


class Diagnostics(Findings, Sequence[CompilationRecord]):
    """All findings of a compilation, as a sequence of records with messages."""

    @cached_property
    def _records(self) -> list[CompilationRecord]:
        return records(self.found, self.step)

    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)


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
    kind, level = KIND_OF[f.kind], INFO if f.kind in _QUIET else WARNING
    message = _SENTENCES[f.kind].format_map(_words(f, step))
    context: Options = {"sources": [n.source for n in f.nodes]} if f.nodes else {}
    primitive: Primitive | None = None
    weight, paths = next(iter(f.params), None), f.states
    if isinstance(f.of, Use):
        site = f.of.site
        primitive, weight = site.primitive, next(iter(f.params or f.of.params), None)
        context |= {"found": site.found, "context": site.context, "loops": site.loops}
    elif f.nodes:
        primitive = f.nodes[0].primitive
    if f.kind in (Found.RULE_NOT_LINEAR, Found.STATE_WITHOUT_TRACE):
        context["weight_paths"] = list(f.params)
    if f.kind in (Found.NO_MARKED_OP, Found.RULE_NOT_LINEAR):
        weight = None  # of the model, not of one parameter
    if f.kind in (Found.CASCADE, Found.UNLEARNED_CASCADE):
        paths = (*paths, *f.detail)
    return CompilationRecord(kind, level, message, primitive, weight, paths, context)


def _words(f: Finding, step: Step) -> Options:
    """The words for the places in a sentence."""
    node = next(iter(f.nodes), None)
    words: Options = {"params": show_paths(f.params), "states": show_paths(f.states)}
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
