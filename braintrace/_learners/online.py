"""Make a `Learner` of a step function or of a `brainstate` module."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .._frontends.functions import Function, read_function
from .._frontends.modules import Mark, check_mark
from .._online.request import WindowSize, check_window
from .._types import Option, Options, PyTree, RuleLike
from .compiled_step import CompiledStep
from .learner import Learner
from .rule_choice import RuleChoice


def online(
    step: Callable[..., PyTree],
    params: PyTree,
    carry: PyTree,
    x: PyTree,
    *,
    rule: RuleLike = None,
    mark: Mark = "auto",
    window: WindowSize | None = None,
    order: str | None = None,
    untraced: Iterable[str] = (),
    **options: Option,
) -> Learner:
    """Make a learner that trains `step(params, carry, x) -> (carry, y)` online.

    Args:
        step: The function of one time step, over any pytrees, of any framework.
        params: The parameters. Leaves that are not arrays are static.
        carry: The state before the first step. Inexact arrays in it are hidden states.
        x: The input of one step; only its shapes are used.
        rule: A rule of `braintrace.rules`, its class or its name ('es_d_rtrl'), or a pair of one of these
            and a dictionary of options; `D_RTRL()` by default. If its learning signal has inputs, these are
            passed to `step` by name (`modulator=`, `target=`), and as sequences to `grad`.
        mark: 'auto' finds the operations that use parameters; 'ops' uses those that are marked by hand.
        window: Back-propagate through windows of this many steps; traces summarise earlier steps.
        order: The arguments of `step` after `params`, and its results, if not 'carry x -> carry y': 'x carry
            -> y carry' for Haiku and spyx, 'x carry -> carry' for the cells of Equinox.
        untraced: Names of leaves or subtrees of the carry that have no trace and are not reset with a
            sample: running statistics ('stats', '1.mean').
        **options: Options of a rule that is given by its name or class, or of `D_RTRL`: `rank`, `basis`,
            `across`, `decay_or_rank`, ...

    Returns:
        A `Learner`.

    Raises:
        CompilationError: `step` has another order, or returns a carry of other shapes or types.

    >>> import braintrace, jax, jax.numpy as jnp
    >>> def step(params, h, x):
    ...     h = 0.9 * h + jnp.tanh(x @ params["w"])
    ...     return h, h @ params["out"]
    >>> params = {"w": jnp.ones((3, 4)), "out": jnp.ones((4, 1))}
    >>> learner = braintrace.online(step, params, jnp.zeros(4), jnp.ones(3))
    >>> traces = learner.init(params, jnp.zeros(4))
    >>> loss = lambda y, target: jnp.mean((y - target) ** 2)
    >>> xs, ys = jnp.ones((5, 3)), jnp.ones((5, 1))
    >>> grads, (h, traces), (losses, _) = learner.grad(loss, params, jnp.zeros(4), traces, xs, ys)
    >>> grads["w"].shape, losses.shape
    ((3, 4), (5,))
    """
    names = [tuple(name.split(".")) for name in untraced]
    is_untraced = lambda path: any(path[1 : 1 + len(name)] == name for name in names)
    function = read_function(step, params, carry, x, is_untraced, order)
    known = [p[1:] for p in function.carry.paths]
    unknown = [name for name in names if not any(p[: len(name)] == name for p in known)]
    if unknown:
        leaves = ", ".join(map(repr, map(".".join, known)))
        raise ValueError(f"`untraced` has {'.'.join(unknown[0])!r}; the leaves of the carry are {leaves}.")
    return make_learner(function, carry, rule, mark, window, options)


def make_learner(
    function: Function,
    carry: PyTree,
    rule: RuleLike = None,
    mark: Mark = "auto",
    window: WindowSize | None = None,
    options: Options | None = None,
) -> Learner:
    """Make a learner of a traced function; samples are reset to `carry`."""
    choice = RuleChoice.of("d_rtrl" if rule is None else rule)
    chosen, its_window = (choice.with_options(**options) if options else choice).read()
    check_mark(mark)
    check_window(window)
    compiled = CompiledStep(function, chosen, mark, its_window if window is None else window)
    return Learner(compiled, function.carry.leaves(carry))
