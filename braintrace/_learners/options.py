"""Constructors of learner classes, from a table of options.

A class lists the names of its options in order (`takes`) and makes its rule from their values (`choose`);
signature, arguments in the docstring and example come from the table.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from types import SimpleNamespace
from typing import ClassVar, Literal, NamedTuple

import brainstate
import jax.numpy as jnp

from .. import rules
from .._frontends.modules import Mark
from .._online.request import WindowSize, check_choice
from .._rules.bounds import Normalized
from .._rules.rule import Rule
from .._rules.snap import MOST
from .._types import Array, DTypeLike, Key, Model, Option, Options, PyTree
from .calling import VjpMethod
from .config import ETraceConfig
from .stateful import ETraceAlgorithm

Axis = int | Literal["auto"] | None
Basis = Literal["balanced", "pushed"]
Decay = float | tuple[float, float]
REQUIRED = Parameter.empty
_FIRST = Parameter.POSITIONAL_OR_KEYWORD


# the type, default and effect of every option
OPTIONS: dict[str, tuple[object, object, str]] = {
    "window": (WindowSize | None, None, "Back-propagate through windows of this many steps, or 'auto'."),
    "rank": (int, 0, "Rank of a correction to the diagonal traces, for each sample."),
    "samples": (Axis, "auto", "Axis of the samples in the states; 'auto' finds it, None means one sample."),
    "basis": (Basis, "balanced", "Basis of the correction: one for all samples, or 'pushed' for each."),
    "across": (Literal["layers"] | None, None, "'layers' keeps the influence on the layers above a weight."),
    "mark": (Mark, "ops", "'auto' marks the ops that use a parameter; with 'ops' the model marks them."),
    "trace_dtype": (DTypeLike | None, None, "Type of the stored traces; that of the computation by default."),
    "vjp_method": (VjpMethod | None, None, "'multi-step' for calls with `MultiStepData`; see `window`."),
    "name": (str | None, None, "Name of the module."),
    "config": (ETraceConfig | None, None, "Chooses another rule of the same kind."),
    "max_jacobian_elements": (int, MOST, "Largest size of a SnAp pattern, for all samples."),
    "normalize_matrix_spectrum": (bool, False, "Divide `D` by its spectral radius, where that is above one."),
    "decay_or_rank": (Decay, 0.9, "Decay in [0, 1), or rank `r` for `(r - 1) / (r + 1)`; or a pair."),
    "feedback": (str, "symmetric", "'symmetric', 'random' or 'adaptive'."),
    "feedback_decay": (float, 0.0, "Decay of adaptive matrices towards the readout."),
    "kappa_filter_decay": (float | None, None, "Decay of the filter; by default that of the readout."),
    "leak": (float | None, REQUIRED, "Decay of the units, in [0, 1)."),
    "mode": (str, REQUIRED, "Variant of the rule."),
    "trace_clip_abs": (float | None, None, "Bound of each number of a trace."),
    "B_list": (Sequence[Array] | None, None, "A matrix for each group of hidden states, (targets, units)."),
    "target_timing": (str, "per-step", "With 'sequence-end', a call without a target has no signal."),
    "num_targets": (int | None, None, "Size of a target, to draw the matrices."),
    "key": (Key | int | None, None, "Key of the random matrices or signs."),
    "lambda_post": (float, REQUIRED, "Decay of the inputs before an output."),
    "lambda_pre": (float, REQUIRED, "Decay of the outputs before an input."),
    "alpha_post": (float, 1.0, "Weight of inputs before outputs."),
    "alpha_pre": (float, 1.0, "Weight of outputs before inputs."),
    "modulator": (PyTree, None, "Modulator of calls that are given none."),
    "n": (int, 2, "Number of steps that the pattern reaches."),
    "eps": (float, 1e-12, "Added to norms, as in the paper."),
    "synthesizer": (object, None, "Estimates the gradient of the losses after a window."),
    "fast_solve": (bool, True, ""),
    "chunked_trace": (bool, True, ""),
    "control_flow": (object, None, ""),
    "random_feedback_key": (Key | int | None, None, ""),
    "snap_max_jacobian_elements": (int, MOST, ""),
}

# spellings of 0.2.x, which every learner that has the option accepts
OLD_NAMES = {
    "random_feedback_key": "key",
    "projection_key": "key",
    "projection_eps": "eps",
    "snap_max_jacobian_elements": "max_jacobian_elements",
}


class Choice(NamedTuple):
    """The rule, config and attributes that the options of a learner choose."""

    rule: Rule
    config: ETraceConfig | None = None
    attributes: Mapping[str, object] = {}  # of the learner, in addition to those of all learners


class OptionsLearner(ETraceAlgorithm):
    """A learner whose class lists its options."""

    takes: ClassVar[str]  # names in order, keywords after `*`
    defaults: ClassVar[Options] = {}  # where they differ from those of the rule and of `OPTIONS`
    example: ClassVar[str] = ""  # options in the docstring's example
    make_rule: ClassVar[Callable[..., Rule]]  # the rule of the same name
    factorization: ClassVar[str]  # of a `config`, if that is among the options
    config_of_rule: ClassVar[ETraceConfig | None] = None
    keeps: ClassVar[tuple[str, ...]] = ()  # options that are attributes of the learner
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # values of options
    ignores: ClassVar[tuple[str, ...]] = ()  # options without effect, next to those of `OPTIONS`

    def __init_subclass__(cls) -> None:
        if "takes" in vars(cls):
            cls.make_rule = getattr(rules, cls.__name__, None) or cls.make_rule
            cls.__init__ = _constructor(cls)  # type: ignore[method-assign]
            cls.__doc__ = f"{(cls.__doc__ or '').rstrip()}\n\n{_describe(cls)}"
        super().__init_subclass__()

    @classmethod
    def read_options(cls, model: Model, *args: PyTree, **options: Option) -> tuple[SimpleNamespace, Choice]:
        """The values of all options, checked, and the rule that they choose; the model is not used."""
        for old in OLD_NAMES.keys() & options.keys() - {*cls.takes.split()}:
            if OLD_NAMES[old] in options:
                raise TypeError(f"{cls.__name__}: `{old}` and `{OLD_NAMES[old]}` are one option.")
            options[OLD_NAMES[old]] = options.pop(old)
        try:
            bound = _signature(cls, cls.takes).bind(None, model, *args, **options)
        except TypeError as e:
            raise TypeError(f"{cls.__name__}: {e}.") from None
        bound.apply_defaults()
        given = SimpleNamespace(**bound.arguments)
        for name, values in cls.choices.items():
            check_choice(name, getattr(given, name), values)
        if hasattr(given, "trace_dtype"):
            given.trace_dtype = as_trace_dtype(given.trace_dtype)
        choice = cls.choose(given)
        if getattr(given, "normalize_matrix_spectrum", False):
            if not isinstance(choice.rule, rules.D_RTRL):
                raise ValueError("`normalize_matrix_spectrum` is for rules with a trace of every weight.")
            choice = choice._replace(rule=dataclasses.replace(choice.rule, bound=Normalized()))
        return given, choice

    @classmethod
    def has_effect(cls, name: str) -> bool:
        """Whether an option is more than accepted."""
        return bool(OPTIONS[name][2]) and name not in cls.ignores

    @classmethod
    def choose(cls, options: SimpleNamespace) -> Choice:
        """The rule for values of the options: that of the option `config`, or else of `make_rule`."""
        config: ETraceConfig | None = getattr(options, "config", None)
        if config is not None:
            most = getattr(options, "max_jacobian_elements", MOST)
            config = as_config(config, cls, cls.factorization)
            rule = config.rule(options.key, options.trace_dtype, most)
        else:
            known = signature(cls.make_rule).parameters
            rule = cls.make_rule(**{k: v for k, v in vars(options).items() if k in known})
        attributes = {name: getattr(options, name) for name in cls.keeps}
        return Choice(rule, config or cls.config_of_rule, attributes)


def _as_shown(cls: type[OptionsLearner]) -> str:
    """The list of options as `help` shows it: those of the rule, then keywords, newer ones first.

    The constructor takes all of them in the order of 0.2.x, which starts with `name` after those of the rule.
    """
    first, _, last = cls.takes.partition("*")
    own = list(itertools.takewhile(lambda name: name != "name", first.split()))
    keywords = [*last.split(), *first.split()[len(own) :]]
    return " ".join([*own, "*", *sorted(keywords, key=cls.has_effect, reverse=True)])


def _signature(cls: type[OptionsLearner], takes: str) -> Signature:
    """The signature of the constructor of a class, from a list of options."""
    of_rule = {k: p.default for k, p in signature(cls.make_rule).parameters.items()}
    defaults = {k: v for k, (_, v, _) in OPTIONS.items()} | of_rule | cls.defaults
    parameters = [Parameter("self", _FIRST), Parameter("model", _FIRST, annotation=brainstate.nn.Module)]
    positional, _, keywords = takes.partition("*")
    for names, kind in ((positional, _FIRST), (keywords, Parameter.KEYWORD_ONLY)):
        parameters += [
            Parameter(name, kind, default=defaults[name], annotation=OPTIONS[name][0])
            for name in names.split()
        ]
    return Signature(parameters, return_annotation=None)


def _constructor(cls: type[OptionsLearner]) -> Callable[..., None]:
    """An `__init__` with the options that the class lists."""

    def __init__(self: OptionsLearner, *args: PyTree, **options: Option) -> None:
        given, choice = type(self).read_options(*args, **options)
        shared = {k: v for k, v in vars(given).items() if k in ("vjp_method", "window", "mark", "name")}
        ETraceAlgorithm.__init__(self, given.model, choice.rule, config=choice.config, **shared)
        for name, value in choice.attributes.items():
            setattr(self, name, value)

    __init__.__signature__ = _signature(cls, _as_shown(cls))  # type: ignore[attr-defined]
    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    return __init__


def _describe(cls: type[OptionsLearner]) -> str:
    """The arguments and the example of a class's docstring."""
    names = _as_shown(cls).replace("*", "").split()
    lines = ["model: The model that learns, with an `update` method."]
    lines += [f"{name}: {OPTIONS[name][2]}" for name in names if cls.has_effect(name)]
    unused = ", ".join(f"`{name}`" for name in names if not cls.has_effect(name))
    lines += [f"{unused}: Accepted without effect, for code written for 0.2.x."] if unused else []
    given = ", ".join(["braintrace.nn.GRUCell(3, 4)", *filter(None, [cls.example])])
    example = [">>> import braintrace, jax.numpy as jnp", f">>> learner = braintrace.{cls.__name__}({given})"]
    sections = ((title, f"\n{' ' * 8}".join(some)) for title, some in (("Args", lines), ("Example", example)))
    return "\n\n".join(f"    {title}:\n        {text}" for title, text in sections) + "\n    "


def as_trace_dtype(dtype: DTypeLike | None) -> DTypeLike | None:
    """A type that traces can be stored in: of floating or complex numbers."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.inexact):
        raise TypeError(f"`trace_dtype` is a floating type, such as `jnp.bfloat16`, not {dtype!r}.")
    return found


def as_config(config: object, learner: type, factorization: str) -> ETraceConfig:
    """A config that a learner can take."""
    if not isinstance(config, ETraceConfig):
        raise TypeError(f"`config` is a `braintrace.ETraceConfig`, not {config!r}.")
    if config.trace_factorization != factorization:
        raise ValueError(
            f"{learner.__name__} has `trace_factorization={factorization!r}`, and the config has "
            f"{config.trace_factorization!r}: `braintrace.compile(model, config, ...)` takes the learner for "
            "it."
        )
    return config
