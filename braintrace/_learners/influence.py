"""Learners that keep the influence of every parameter, in another form than traces of weights."""

from __future__ import annotations

from typing import Any

from .. import _rules as rules
from .._executor.trace_recursion import Own, Recursion
from .config import ETraceConfig
from .options import Choice, OptionsLearner, as_config


class SnAp(OptionsLearner):
    """Sparse n-step approximation of RTRL: the influence of every parameter where `n` steps can reach.

        P[t] = M * (H[t] P[t-1] + dh[t]/dw)

    with the full Jacobian `H` = dh[t]/dh[t-1], and `M` one where an entry of a parameter acts on a state
    variable within `n` steps. The pattern comes from the structure of the step, for every parameter: sparse
    and grouped products, convolutions, layers. A dense recurrence reaches everything in two steps: then, and
    with `n` large enough on any model, the gradient is that of RTRL. Menick et al., 2020 (arXiv:2006.07232).

    With `n=1` it keeps a trace of every weight as `D_RTRL` does, at its price, which decays with how each
    unit acts on itself, through recurrent weights as well (`mark` and `trace_dtype` are for these traces;
    what has none, and acts on many units at once, learns within the step). Of a unit with one state that is
    the pattern above; of one with several, a trace covers them all, and `M` those that the weight reaches
    within the step. With more steps, a call is a window of one step, in which nothing is left out; with
    `window=k` so are `k` steps. A pattern of more than `snap_max_jacobian_elements` numbers is refused with
    its size (in 0.2.6 the limit is on the blocks of `H`, and patterns stay within a group of states). In the
    paper the signal at the new state meets `P[t]`; here, for `n > 1` and whatever `vjp_method`, the step is
    back-propagated through and the signal at the old state meets `P[t-1]`, so that what `M` leaves out is
    missed one step later: a gradient closer to RTRL's.
    """

    takes = (
        "n name vjp_method (fast_solve) snap_max_jacobian_elements * window samples mark trace_dtype "
        "(chunked_trace) (control_flow) (random_feedback_key)"
    )

    @classmethod
    def choose(cls, options: Any) -> Choice:
        n, most = options.n, options.snap_max_jacobian_elements
        rule: rules.Rule = rules.SnAp(n, most, options.samples)
        if n == 1:
            rule = rules.D_RTRL(options.trace_dtype, recursion=Recursion(Own()), called="SnAp(1)")
        return Choice(rule, ETraceConfig(recurrence_scope="sparse_n", sparse_n=n), {"n": n})


class UORO(OptionsLearner):
    """Unbiased online recurrent optimisation: the influence of all parameters as one random product.

        P ~ s theta^T,    s' = rho0 H s + rho1 nu,    theta' = theta / rho0 + (nu^T dh/dw) / rho1

    with the full Jacobian `H` = dh[t]/dh[t-1] and random signs `nu`: right on average, for every parameter of
    any model, at the memory of the parameters and states of each sample. A single run is far off; averages
    over many steps or samples are not. Tallec and Ollivier, 2017 (arXiv:1702.05043); there is one product for
    each sample of a batch.

    The stream of signs goes on over resets, so that sequences have different signs. With `window=k`, each
    window of `k` steps takes one draw: the longer, the less noise. 0.2.6 keeps a product for each group of
    states, and leaves out what goes from one group to another.
    """

    takes = (
        "name vjp_method (fast_solve) (control_flow) projection_key projection_eps (random_feedback_key) "
        "(snap_max_jacobian_elements) * window samples mark config"
    )

    @classmethod
    def choose(cls, options: Any) -> Choice:
        config = options.config or ETraceConfig("random_projection", recurrence_scope="coupled")
        as_config(config, cls, "random_projection").rule()  # which checks the other axes
        return Choice(rules.UORO(options.projection_key, options.projection_eps, options.samples), config)


class RandomProjectionVjpAlgorithm(UORO):
    """`UORO`, with the place that 0.2.6 has for a `config` among its arguments."""

    takes = (
        "name vjp_method (fast_solve) (control_flow) config projection_key projection_eps "
        "(random_feedback_key) (snap_max_jacobian_elements) * window samples mark"
    )


class KF_RTRL(OptionsLearner):
    """Kronecker-factored RTRL: the influence of each product `y = x w` as a product of two sides.

        P ~ u (x) A,    u' = c1 p1 u + c2 p2 x,    A' = (c1 / p1) H A + (c2 / p2) dh/dy

    with random signs `c` and the `p` of the least variance: right on average, and with far less noise than
    `UORO`, at a memory of batch x state size x outputs for each use of a parameter. Mujika, Meier and
    Steger, 2018 (arXiv:1805.10842), for one weight matrix; here for every use of every parameter, each with
    two sides of its own, in any model where these are products (no convolutions). In windows,
    the two sides advance step by step.
    """

    takes = "name vjp_method projection_key projection_eps * window samples mark"

    @classmethod
    def choose(cls, options: Any) -> Choice:
        return Choice(rules.KF_RTRL(options.projection_key, options.projection_eps, options.samples))
