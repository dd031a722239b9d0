"""What the gradients must be, written down naively: BPTT, and section 1 with dense matrices.

Nothing here uses the compiler: a step is a flat jaxpr that is evaluated again with some of its values
replaced. `bptt` differentiates through time. `Brute` keeps the whole influence of every parameter on every
hidden number, with the recurrence cut down to its diagonal blocks; only the groups (and, where a trace
leaves out paths, the kept positions) are taken from the graph, and for `rank` which states lie where in a
sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.extend.core import primitives as prims
from jax.flatten_util import ravel_pytree

from braintrace import ETPPrimitive
from braintrace._compat import bind, remat_p
from braintrace._executor.bases import fixed_basis
from braintrace._rules.signs import key_at, signs

_CALLS = {prims.jit_p: "jaxpr", remat_p: "jaxpr", prims.closed_call_p: "call_jaxpr"}


def interpret(jaxpr: Any, args: Any, pins: Any = (), at_site: Any = None) -> list[Any]:
    """Evaluate a flat jaxpr; `pins` replace variables as they are made, `at_site` what sites give."""
    pins = dict(pins)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))
    number = 0
    for eqn in jaxpr.eqns:
        vals = [a.val if isinstance(a, Literal) else env[a] for a in eqn.invars]
        if isinstance(eqn.primitive, ETPPrimitive) and at_site is not None:
            outs = [at_site(number, eqn, vals)]
        else:
            outs = bind(eqn, *vals)
        number += isinstance(eqn.primitive, ETPPrimitive)
        for var, out in zip(eqn.outvars, outs, strict=True):
            env[var] = pins.get(var, out)
    return [a.val if isinstance(a, Literal) else env[a] for a in jaxpr.outvars]


def _inline(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        vals = [a.val if isinstance(a, Literal) else env[a] for a in eqn.invars]
        if eqn.primitive in _CALLS:
            inner = eqn.params[_CALLS[eqn.primitive]]
            outs = _inline(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), vals)
        else:
            outs = bind(eqn, *vals)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [a.val if isinstance(a, Literal) else env[a] for a in jaxpr.outvars]


@dataclass
class Functional:
    """A model as one flat function: (params, carried states, x) -> (outputs, new states)."""

    jaxpr: Any
    consts: Any  # of the jaxpr, and of the model
    num_x: int
    param_paths: list[Any]
    param_trees: list[Any]
    params: list[Any]  # leaves
    state_paths: list[Any]  # of each carried leaf
    leaf_paths: list[Any]  # with the names in the state, if it has several leaves
    states: list[Any]  # leaves
    num_out: int

    def args(self, params: Any, states: Any, x: Any) -> list[Any]:
        return [*self.consts, *jax.tree.leaves(x), *params, *states]

    def step(self, params: Any, states: Any, x: Any, **how: Any) -> tuple[list[Any], list[Any]]:
        outs = interpret(self.jaxpr, self.args(params, states, x), **how)
        return outs[: self.num_out], outs[self.num_out :]

    @property
    def state_vars(self) -> list[Any]:
        return self.jaxpr.outvars[self.num_out :]

    def as_tree(self, flat_grads: list[Any]) -> dict[Any, Any]:
        it = iter(flat_grads)
        return {
            path: jax.tree.unflatten(tree, [next(it) for _ in range(tree.num_leaves)])
            for path, tree in zip(self.param_paths, self.param_trees, strict=True)
        }


def functional(model: Any, x: Any) -> Functional:
    xs = x if isinstance(x, tuple) else (x,)
    sf = brainstate.transform.StatefulFunction(model.update, return_only_write=False)
    sf.make_jaxpr(*xs)
    closed, states = sf.get_jaxpr(*xs), sf.get_states(*xs)
    paths = {id(st): tuple(map(str, p)) for p, st in model.states().items()}
    values = [st.value for st in states]
    is_param = [isinstance(st, brainstate.ParamState) for st in states]
    return flatten(
        closed, jax.tree.leaves(xs), values, [paths.get(id(st), ("?",)) for st in states], is_param
    )


def flatten(
    closed: Any, xs: list[Any], values: list[Any], paths: list[Any], is_param: list[bool]
) -> Functional:
    """A step `(xs, values) -> (outputs, values)` of which some values are parameters."""
    leaves = list(map(jax.tree.leaves, values))
    num_x = len(xs)
    inner = getattr(closed, "jaxpr", closed)
    consts = list(closed.consts)
    num_out = len(inner.outvars) - sum(map(len, leaves))

    def flat(*args: Any) -> list[Any]:
        cs, x, rest = args[: len(consts)], args[len(consts) :][:num_x], iter(args[len(consts) + num_x :])
        ps = [[next(rest) for _ in vs] if p else None for vs, p in zip(leaves, is_param, strict=True)]
        ss = [[next(rest) for _ in vs] if not p else None for vs, p in zip(leaves, is_param, strict=True)]
        given = [v for p, s in zip(ps, ss, strict=True) for v in (p if p is not None else s)]
        outs = _inline(inner, cs, [*x, *given])
        new, it = [], iter(outs[num_out:])
        seen = [*args]
        for vs, p in zip(leaves, is_param, strict=True):
            for _ in vs:
                v = next(it)
                if not p:
                    if any(v is s for s in seen) or not isinstance(v, jax.core.Tracer):
                        v = jax.lax.optimization_barrier(v)
                    seen.append(v)
                    new.append(v)
        return [*outs[:num_out], *new]

    pick = lambda items, which: [i for i, p in zip(items, is_param, strict=True) if p is which]
    params, carried = (jax.tree.leaves(pick(leaves, which)) for which in (True, False))
    made = jax.make_jaxpr(flat)(*consts, *xs, *params, *carried)
    return Functional(
        jaxpr=made.jaxpr,
        consts=[*made.consts, *consts],
        num_x=num_x,
        param_paths=pick(paths, True),
        param_trees=list(map(jax.tree.structure, pick(values, True))),
        params=params,
        state_paths=[
            path for path, vs in zip(pick(paths, False), pick(leaves, False), strict=True) for _ in vs
        ],
        leaf_paths=[
            path
            for of in zip(pick(paths, False), pick(values, False), strict=True)
            for path in _leaf_paths(*of)
        ],
        states=carried,
        num_out=num_out,
    )


def _leaf_paths(path: Any, value: Any) -> list[Any]:
    keys = [keys for keys, _ in jax.tree_util.tree_flatten_with_path(value)[0]]
    if len(keys) == 1:
        return [path]
    return [(*path, *(jax.tree_util.keystr((k,), simple=True) for k in inner)) for inner in keys]


def loss(outs: Any) -> Any:
    """The loss of one step; not linear, so that signals matter."""
    return sum(jnp.sum(jnp.real(jnp.sin(o) + 0.3 * o**2)) for o in jax.tree.leaves(outs))


def bptt(model: Any, xs: list[Any], *, forward: bool = False, jit: Any = jax.jit) -> dict[Any, Any]:
    """The gradient of the summed losses through all steps."""
    f = functional(model, xs[0])

    def total(params: Any, states: Any, xs: Any) -> Any:
        def step(states: Any, x: Any) -> Any:
            outs, states = f.step(params, states, x)
            return states, loss(outs)

        return jnp.sum(jax.lax.scan(step, states, xs)[1])

    return f.as_tree(jit((jax.jacfwd if forward else jax.grad)(total))(f.params, f.states, stack(xs)))


def stack(xs: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *a: np.stack(a), *xs)


def windows_of(xs: list[Any], size: int, *, rest_first: bool = True) -> list[list[Any]]:
    """Windows of so many steps, the rest first or last."""
    begin = len(xs) % size if rest_first else 0
    starts = [*([0] if begin else []), *range(begin, len(xs), size)]
    return [xs[a:b] for a, b in itertools.pairwise([*starts, len(xs)])]


@dataclass(frozen=True)
class Units:
    """What others read of a group: as a function of its new states, and the outputs with something added."""

    read: Any  # states by name -> what is read
    outs: Any  # parameters and old states by name, x, what is added to what is read of each group -> outputs


class Brute:
    """D-RTRL and ES-D-RTRL by their definitions, with dense matrices."""

    def __init__(self, model: Any, x: Any, graph: Any, jit: Any = jax.jit) -> None:
        self.jit = jit
        self.f = f = model if isinstance(model, Functional) else functional(model, x)
        self.theta = np.concatenate([np.ravel(p) for p in f.params])
        self.groups = []
        for group in graph.hidden_groups:
            members = [i for p in group.hidden_paths for i, q in enumerate(f.leaf_paths) if q == tuple(p)]
            self.groups.append((members, np.concatenate([h.positions.ravel() for h in group.hidden])))
        self.sites = {}  # (site, group) -> which of (hidden number, y element) the trace keeps
        for r in graph.hidden_param_op_relations:
            for g, m in zip(r.hidden_groups, r.position_maps, strict=True):
                keep = None
                if not m.complete:
                    places = self.groups[g.index][1]
                    size = int(np.prod(r.site.shape, dtype=int))
                    if m.on_hidden:
                        keep = m.map.ravel()[places][:, None] == np.arange(size)
                    else:
                        keep = places[:, None] == m.map.ravel()[None]
                self.sites[r.site.index, g.index] = keep
        self.traced = sorted({s for s, _ in self.sites})
        self._jitted = jit(self._advance, static_argnums=0)
        self._with_signals = False
        self._window = jit(self._through_window)
        self._site_vjp = jit(self._pull_sites)
        self._full = jit(self._whole_jacobian, static_argnums=0)
        self._units = jit(self._at_units, static_argnums=(0, 1))
        self._flows: dict[Any, Any] = {}

    def unravel(self, theta: Any) -> list[Any]:
        ends = np.cumsum([p.size for p in self.f.params])
        return [
            theta[end - p.size : end].reshape(p.shape) for end, p in zip(ends, self.f.params, strict=True)
        ]

    def advance(self, states: Any, x: Any, *, signals: bool = True) -> Any:
        self._with_signals |= signals  # once they are there, one program does for all
        return jax.tree.map(np.asarray, self._jitted(self._with_signals, self.theta, states, x))

    def _pinned(self, group: int, raw: Any, values: Any = None) -> dict[Any, Any]:
        members = self.groups[group][0]
        values = [raw[i] for i in members] if values is None else values
        return {self.f.state_vars[i]: v for i, v in zip(members, values, strict=True)}

    def _flat(self, group: int, states: Any) -> Any:
        return jnp.concatenate([states[i].ravel() for i in self.groups[group][0]])

    def _unflat(self, group: int, flat: Any, states: Any) -> list[Any]:
        new, at = list(states), 0
        for i in self.groups[group][0]:
            n = states[i].size
            new[i] = flat[at : at + n].reshape(states[i].shape)
            at += n
        return new

    def _advance(self, signals: bool, theta: Any, states: Any, x: Any) -> dict[str, Any]:
        """Everything that the definitions need of one step; with windows, traces alone."""
        f, stop = self.f, jax.lax.stop_gradient
        params = self.unravel(theta)
        _, raw = f.step(params, states, x)
        sites = self.traced

        def detached(number: int, eqn: Any, vals: Any, added: Any = ()) -> Any:
            y = eqn.primitive.bind(*map(stop, vals), **eqn.params)
            return y + dict(added)[number] if number in dict(added) else y

        seen: dict[int, Any] = {}

        def record(number: int, eqn: Any, vals: Any) -> Any:
            seen[number] = (eqn, vals)
            return eqn.primitive.bind(*vals, **eqn.params)

        f.step(params, states, x, at_site=record)
        ys = {s: seen[s][0].outvars[0].aval for s in sites}
        D, J, g = {}, {}, {}
        for k in range(len(self.groups)):
            places = self.groups[k][1]

            def local(flat: Any, k: int = k) -> Any:
                return self._flat(k, f.step(params, self._unflat(k, flat, states), x, at_site=detached)[1])

            full = jax.jacrev(local)(self._flat(k, states))
            D[k] = jnp.where(places[:, None] == places[None], full, 0)

            others = {
                v: stop(w) for m in range(len(self.groups)) if m != k for v, w in self._pinned(m, raw).items()
            }
            for s in sites:
                if (s, k) not in self.sites:
                    continue

                def instant(p: Any, k: int = k, s: int = s, others: Any = others) -> Any:
                    add = partial(detached, added={s: p.reshape(ys[s].shape)})
                    return self._flat(k, f.step(params, states, x, at_site=add, pins=others)[1])

                zero = jnp.zeros(int(np.prod(ys[s].shape, dtype=int)), ys[s].dtype)
                J[s, k] = jax.jacrev(instant)(zero)
                if self.sites[s, k] is not None:
                    J[s, k] = jnp.where(self.sites[s, k], J[s, k], 0)

            if not signals:
                continue

            def signal(delta: Any, k: int = k) -> Any:
                """The loss with `delta` added to the states of group k, for all but their own coupling.

                What another state of the group gets through a marked op or another group does count, so
                the pinned values are refined until they hold it.
                """
                own = self._flat(k, raw)
                for _ in range(len(self.groups[k][0])):
                    seen_y: dict[int, Any] = {}

                    def keep(number: int, eqn: Any, vals: Any, seen_y: Any = seen_y) -> Any:
                        seen_y[number] = eqn.primitive.bind(*vals, **eqn.params)
                        return seen_y[number]

                    pins = self._pinned(k, self._unflat(k, own + delta, raw))
                    outs, new = f.step(params, states, x, pins=pins, at_site=keep)
                    others = {
                        v: w
                        for m in range(len(self.groups))
                        if m != k
                        for v, w in self._pinned(m, new).items()
                    }
                    given = lambda number, eqn, vals, seen_y=seen_y: seen_y[number]
                    own = self._flat(k, f.step(params, states, x, pins=others, at_site=given)[1])
                return loss(outs)

            g[k] = jax.grad(signal)(jnp.zeros_like(self._flat(k, raw)))

        inputs = {s: _input_of(*seen[s]) for s in sites}
        result = {
            "states": raw,
            "D": D,
            "J": J,
            "dy": jax.jacrev(lambda t: self._site_outputs(t, states, x))(theta) if sites else {},
            "inputs": {s: v for s, v in inputs.items() if v is not None},
        }
        if not signals:
            return result
        pinned = {v: w for k in range(len(self.groups)) for v, w in self._pinned(k, raw).items()}

        def of_old(flats: Any) -> Any:
            old = states
            for k, flat in enumerate(flats):
                old = self._unflat(k, flat, old)
            return loss(f.step(params, old, x, pins=pinned)[0])

        old = jax.grad(of_old)([self._flat(k, states) for k in range(len(self.groups))])

        def within(theta: Any) -> Any:
            return loss(f.step(self.unravel(theta), states, x)[0])

        return {**result, "g": g, "old": old, "within": jax.grad(within)(theta)}

    def d_rtrl(self, xs: list[Any], window: int | None = None) -> dict[Any, Any]:
        """`sum_t <g[t], M[t]>` plus what the traces do not stand for; or in windows."""
        influence = [np.zeros((len(p), self.theta.size), self.theta.dtype) for _, p in self.groups]
        states, grad = self.f.states, np.zeros_like(self.theta)
        for chunk in windows_of(xs, window or 1):
            if window:
                own, at_start = jax.tree.map(np.asarray, self._window(self.theta, states, stack(chunk)))
                grad = grad + own + sum(a @ M for a, M in zip(at_start, influence, strict=True))
            for x in chunk:
                now = self.advance(states, x, signals=not window)
                if not window:
                    grad = grad + now["within"]
                    for k, M in enumerate(influence):
                        grad = grad + (now["g"][k] @ now["D"][k] + now["old"][k]) @ M
                influence = self._influence(now, influence)
                states = now["states"]
        return self.f.as_tree(self.unravel(grad))

    def _influence(self, now: dict[str, Any], influence: list[Any]) -> list[Any]:
        """What the traces stand for, after a step: of each group, (its numbers, parameters)."""
        return [
            now["D"][k] @ M + sum(now["J"][s, j] @ now["dy"][s] for s, j in self.sites if j == k)
            for k, M in enumerate(influence)
        ]

    def d_rtrl_rank(
        self, xs: list[Any], window: int, rank: int, leaves: list[int], axis: int | None, pair: Any = None
    ) -> dict[Any, Any]:
        """D-RTRL in windows with a correction `T V` to the diagonal influence `E` of each sample.

        Over a window with `H` = d h[end]/d h[start] and `W` = d h[end]/d theta:

            V' = S'^T (H (E + T V) + W - E')
            gradient = within the window + dL/dh[start] (E + T V)

        `pair` holds `S` and `T`, the same at all times; by default both are a basis `U' = basis of H U` that
        is pushed along. The state variables of a sample are those of the leaves `leaves`, in this order;
        samples lie along `axis`, unless there is only one.
        """
        samples = self._samples(leaves, axis)
        start = np.asarray(fixed_basis(len(samples[0]), rank))
        S, T = ([(start if pair is None else pair[i]) for _ in samples] for i in range(2))
        V = [np.zeros((start.shape[1], self.theta.size)) for _ in samples]
        influence = [np.zeros((len(p), self.theta.size)) for _, p in self.groups]
        states, grad = self.f.states, np.zeros_like(self.theta)
        flow = self._flow_of(leaves)
        for chunk in windows_of(xs, window):
            E = self._of_leaves(influence, leaves)
            own, signal, H, W, _ = flow(self.theta, states, chunk)
            for x in chunk:
                now = self.advance(states, x, signals=False)
                influence, states = self._influence(now, influence), now["states"]
            E_new = self._of_leaves(influence, leaves)
            grad = grad + own
            for s, i in enumerate(samples):
                P = E[i] + T[s] @ V[s]
                grad = grad + signal[i] @ P
                R = H[i][:, i] @ P + W[i] - E_new[i]
                if pair is None:
                    S[s] = T[s] = _basis(H[i][:, i] @ T[s], start)
                V[s] = S[s].T @ R
        return self.f.as_tree(self.unravel(grad))

    def _samples(self, leaves: list[int], axis: int | None) -> list[Any]:
        """Of each sample, where its numbers are among those of some states, one after the other."""
        sizes = [self.f.states[i].size for i in leaves]
        places = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        shaped = [p.reshape(self.f.states[i].shape) for p, i in zip(places, leaves, strict=True)]
        if axis is None:
            return [np.arange(sum(sizes))]
        split = [np.moveaxis(p, axis, 0).reshape(p.shape[axis], -1) for p in shaped]
        return list(np.concatenate(split, 1))

    def snap(self, xs: list[Any], window: int, n: int, leaves: list[int]) -> dict[Any, Any]:
        """`P = M * (H P + W)` at every step; the pattern `M` from derivatives at random places."""
        flow = self._flow_of(leaves)
        rng, moves, mask = np.random.RandomState(5), False, False
        for _ in range(4):
            near = lambda a: a + 0.3 * rng.randn(*np.shape(a))
            _, _, H, W, _ = flow(near(self.theta), list(map(near, self.f.states)), [near(xs[0])])
            moves, mask = moves | (H != 0), mask | (W != 0)
        for _ in range(n - 1):
            mask = mask | (moves @ mask)
        P, states, grad = np.zeros(mask.shape), self.f.states, np.zeros_like(self.theta)
        for chunk in windows_of(xs, window):
            own, signal, *_ = flow(self.theta, states, chunk)
            grad = grad + own + signal @ P
            for x in chunk:
                _, _, H, W, states = flow(self.theta, states, [x])
                P = np.where(mask, H @ P + W, 0.0)
        return self.f.as_tree(self.unravel(grad))

    def uoro(
        self, xs: list[Any], window: int, leaves: list[int], axis: int | None, key: int, eps: float
    ) -> dict[Any, Any]:
        """One random product `s theta^T` for each sample; samples as in `d_rtrl_rank`."""
        samples = self._samples(leaves, axis)
        s = [np.zeros(len(i)) for i in samples]
        theta = [np.zeros_like(self.theta) for _ in samples]
        states, grad, norm = self.f.states, np.zeros_like(self.theta), np.linalg.norm
        flow = self._flow_of(leaves)
        for count, chunk in enumerate(windows_of(xs, window)):
            own, signal, H, W, states = flow(self.theta, states, chunk)
            nus = np.asarray(signs(key_at(key, count), (len(samples), 1, len(samples[0])), float))
            grad = grad + own
            for b, i in enumerate(samples):
                grad = grad + (signal[i] @ s[b]) * theta[b]
                nu, pushed = nus[b, 0], H[i][:, i] @ s[b]
                rho0 = np.sqrt(norm(theta[b]) / (norm(pushed) + eps)) + eps
                rho1 = np.sqrt(norm(nu @ W[i]) / (norm(nu) + eps)) + eps
                s[b] = rho0 * pushed + rho1 * nu
                theta[b] = theta[b] / rho0 + nu @ W[i] / rho1
        return self.f.as_tree(self.unravel(grad))

    def kf_rtrl(
        self, xs: list[Any], leaves: list[int], axis: int | None, sites: list[int], key: int, eps: float
    ) -> dict[Any, Any]:
        """Two sides `u`, `A` of each site for each sample, in windows of one step.

        Where there are several samples, they lie along the first axis of states and outputs of sites.
        """
        samples = self._samples(leaves, axis)
        self.traced, norm = sites, np.linalg.norm
        u: dict[Any, Any] = {}  # of each site and sample: the input side, of the op and of a bias
        A: dict[Any, Any] = {}
        states, grad = self.f.states, np.zeros_like(self.theta)
        flow, instant = self._flow_of(leaves), self.jit(partial(self._instant, leaves))
        for count, x in enumerate(xs):
            own, signal, H, _, after = flow(self.theta, states, [x])
            inputs, J, ones = jax.tree.map(np.asarray, instant(self.theta, states, x))
            grad = grad + own
            step = key_at(key, count)
            for s in sites:
                c = np.asarray(signs(jax.random.fold_in(step, s), (2, len(samples)), float))
                outs = np.arange(J[s].shape[1])
                for b, i in enumerate(samples):
                    o = outs if axis is None else np.split(outs, len(samples))[b]
                    x_now = {k: v if axis is None else v[b] for k, v in inputs.get(s, {}).items()}
                    new = [np.concatenate([v.ravel() for v in x_now.values()] or [np.zeros(0)])]
                    new += [np.ones(int(ones[s]))]
                    new_u, J_now = np.concatenate(new), J[s][i][:, o]
                    if (s, b) in u:
                        dy = np.zeros(len(outs))
                        dy[o] = signal[i] @ A[s, b]
                        x_bar = {}
                        for k, v in inputs.get(s, {}).items():
                            flat = u[s, b][: len(new[0])]
                            one = flat.reshape(x_now[k].shape)
                            x_bar[s] = one if axis is None else np.zeros_like(v)
                            if axis is not None:
                                x_bar[s][b] = one
                        dys = {t: dy if t == s else np.zeros(J[t].shape[1]) for t in sites}
                        scale = u[s, b][-1] if ones[s] else 1.0
                        grad = grad + np.asarray(self._site_vjp(self.theta, states, x, x_bar, scale, dys))
                        pushed = H[i][:, i] @ A[s, b]
                        p1 = np.sqrt(norm(pushed) / (norm(u[s, b]) + eps)) + eps
                    else:
                        u[s, b], pushed, p1 = np.zeros_like(new_u), np.zeros_like(J_now), eps
                    p2 = np.sqrt(norm(J_now) / (norm(new_u) + eps)) + eps
                    u[s, b] = c[0, b] * p1 * u[s, b] + c[1, b] * p2 * new_u
                    A[s, b] = c[0, b] / p1 * pushed + c[1, b] / p2 * J_now
            states = after
        return self.f.as_tree(self.unravel(grad))

    def _instant(self, leaves: list[int], theta: Any, states: Any, x: Any) -> tuple[Any, Any, Any]:
        """Of each site, its input, d h/dy along all paths, and how many of its weights meet a one."""
        seen: dict[int, Any] = {}

        def run(added: Any) -> Any:
            def at_site(number: int, eqn: Any, vals: Any) -> Any:
                if number not in self.traced:
                    return eqn.primitive.bind(*vals, **eqn.params)
                names = eqn.params["names"]
                seen[number] = _input_of(eqn, vals), names if len(vals) > len(names) else ("bias",)
                y = eqn.primitive.bind(*vals, **eqn.params)
                return y if added is None else y + added[number].reshape(y.shape)

            now = self.f.step(self.unravel(theta), states, x, at_site=at_site)[1]
            return jnp.concatenate([now[i].ravel() for i in leaves])

        shapes: dict[int, Any] = {}

        def record(number: int, eqn: Any, vals: Any) -> Any:
            shapes[number] = eqn.outvars[0].aval
            return eqn.primitive.bind(*vals, **eqn.params)

        self.f.step(self.unravel(theta), states, x, at_site=record)
        zeros = {s: jnp.zeros(int(np.prod(shapes[s].shape)), shapes[s].dtype) for s in self.traced}
        J = jax.jacrev(run)(zeros)
        run(None)
        inputs = {s: {0: v} for s, (v, _) in seen.items() if v is not None}
        return inputs, J, {s: "bias" in names for s, (_, names) in seen.items()}

    def d_rtrl_across(self, xs: list[Any], window: int, above: dict[str, Any]) -> dict[Any, Any]:
        """In windows, and beside the diagonal influence `E` the whole `Q` on the states above.

            Q' = H (E + Q) + W - E',    gradient = within the window + dL/dh[start] (E + Q)

        with `H` and `W` as above; `above` has, of each parameter, the states on which `Q` is kept.
        """
        leaves = range(len(self.f.states))
        counts = [int(sum(a.size for a in jax.tree.leaves(p))) for p in self._by_param(self.f.params)]
        names = ["".join(p) for p, n in zip(self.f.param_paths, counts, strict=True) for _ in range(n)]
        rows = ["".join(self.f.state_paths[i]) for i in leaves for _ in range(self.f.states[i].size)]
        kept = np.array([[row in above.get(name, ()) for name in names] for row in rows])
        influence = [np.zeros((len(p), self.theta.size)) for _, p in self.groups]
        Q, states, grad = np.zeros(kept.shape), self.f.states, np.zeros_like(self.theta)
        flow = self._flow_of(leaves)
        for chunk in windows_of(xs, window):
            P = self._of_leaves(influence, leaves) + Q
            own, signal, H, W, _ = flow(self.theta, states, chunk)
            for x in chunk:
                now = self.advance(states, x, signals=False)
                influence, states = self._influence(now, influence), now["states"]
            grad = grad + own + signal @ P
            Q = np.where(kept, H @ P + W - self._of_leaves(influence, leaves), 0)
        return self.f.as_tree(self.unravel(grad))

    def _by_param(self, leaves: list[Any]) -> list[Any]:
        return list(self.f.as_tree(leaves).values())

    def _of_leaves(self, influence: list[Any], leaves: Sequence[int]) -> Any:
        """Influences by groups as those of some states, one after the other; zero where there is no trace."""
        sizes = {i: self.f.states[i].size for i in leaves}
        found = {i: np.zeros((n, self.theta.size)) for i, n in sizes.items()}
        for (members, _), M in zip(self.groups, influence, strict=True):
            at = 0
            for i in members:
                found[i] = M[at : at + sizes[i]]
                at += sizes[i]
        return np.concatenate(list(found.values()))

    def _flow_of(self, leaves: Sequence[int]) -> Any:
        key = tuple(leaves)
        flow = self._flows[key] = self._flows.get(key) or self.jit(partial(self._flow, leaves))
        return lambda theta, states, xs: jax.tree.map(np.asarray, flow(theta, states, stack(xs)))

    def _flow(self, leaves: Sequence[int], theta: Any, states: Any, chunk: Any) -> tuple[Any, ...]:
        """Of a window: dL/dtheta, dL/dh[start], d h[end]/d h[start] and d h[end]/d theta, along all paths.

        Then the states after it.
        """

        def run(theta: Any, start: list[Any]) -> Any:
            now = list(states)
            for i, a in zip(leaves, start, strict=True):
                now[i] = a
            now, value = self._run(theta, now, chunk)
            return jnp.concatenate([value[None], *(now[i].ravel() for i in leaves)]), now

        start, shapes = ravel_pytree([states[i] for i in leaves])
        jacobians = jax.jacrev(lambda t, s: run(t, shapes(s)), (0, 1), has_aux=True)
        (of_theta, of_start), after = jacobians(theta, start)
        of_start = jnp.where(jnp.isfinite(of_start), of_start, 0)  # a slope at zero meets no influence
        return of_theta[0], of_start[0], of_start[1:], of_theta[1:], after

    def _run(self, theta: Any, states: Any, chunk: Any) -> tuple[list[Any], Any]:
        """The states after a window, and its loss."""

        def step(now: Any, x: Any) -> Any:
            outs, now = self.f.step(self.unravel(theta), now, x)
            return now, loss(outs)

        if len(jax.tree.leaves(chunk)[0]) == 1:
            return step(states, jax.tree.map(lambda a: a[0], chunk))
        now, values = jax.lax.scan(step, states, chunk)
        return now, jnp.sum(values)

    def es_d_rtrl(self, xs: list[Any], decay: float, window: int | None = None) -> dict[Any, Any]:
        f_bar: dict[Any, Any] = {}
        x_bar: dict[int, Any] = {}
        states, grad, steps = self.f.states, np.zeros_like(self.theta), 0

        def from_traces(signals: Any, states: Any, x: Any, steps: int) -> Any:
            ones = (1 - decay**steps) / (1 - decay)
            dys = dict.fromkeys(self.traced, 0.0)
            for (s, k), f in f_bar.items():
                dys[s] = dys[s] + signals[k] @ f / (1 - decay**steps)
            return np.asarray(self._site_vjp(self.theta, states, x, x_bar, ones, dys))

        for chunk in windows_of(xs, window or 1):
            if window:
                own, at_start = jax.tree.map(np.asarray, self._window(self.theta, states, stack(chunk)))
                grad = grad + own
                if steps:
                    grad = grad + from_traces(at_start, states, chunk[0], steps)
            for x in chunk:
                now = self.advance(states, x, signals=not window)
                if not window and steps:
                    grad = grad + from_traces(now["old"], states, x, steps)
                for key in self.sites:
                    s, k = key
                    new = (1 - decay) * now["J"][key]
                    f_bar[key] = new + (decay * now["D"][k] @ f_bar[key] if key in f_bar else 0)
                for s, v in now["inputs"].items():
                    x_bar[s] = v + (decay * x_bar[s] if s in x_bar else 0)
                steps += 1
                if not window:
                    grad = grad + now["within"]
                    for s, k in self.sites:
                        grad = grad - (now["g"][k] @ now["J"][s, k]) @ now["dy"][s]
                    grad = grad + from_traces(now["g"], states, x, steps)
                states = now["states"]
        return self.f.as_tree(self.unravel(grad))

    def published(
        self,
        xs: list[Any],
        units: list[Units],
        signal: Any,
        *,
        decay: Any = None,
        kappa: dict[int, float] | None = None,
        at_states: bool = False,
    ) -> dict[Any, Any]:
        """Traces with another decay, filtered where `kappa` says so, times signals at what is read.

        `decay` is None (the local Jacobian), "own" or a number. `signal(t, k, back)` is that of a group at
        what is read of it, or with `at_states` at its states; `back` is the back-propagated one.
        """
        sizes = [len(p) for _, p in self.groups]
        trace = [np.zeros((n, self.theta.size)) for n in sizes]
        read: list[Any] = [0.0] * len(sizes)
        states, grad = self.f.states, np.zeros_like(self.theta)
        for t, x in enumerate(xs):
            now = self.advance(states, x)
            grad = grad + now["within"]
            for s, k in self.sites:
                grad = grad - (now["g"][k] @ now["J"][s, k]) @ now["dy"][s]
            for k, n in enumerate(sizes):
                A = now["D"][k] if decay is None else np.eye(n) * (0 if decay == "own" else decay)
                if decay == "own":
                    places = self.groups[k][1]
                    A = np.where(places[:, None] == places[None], self._whole(k, states, x), 0)
                trace[k] = A @ trace[k] + sum(now["J"][s, g] @ now["dy"][s] for s, g in self.sites if g == k)
                back, slope = self.at_units(units[k], k, states, now["states"], x)
                if at_states:
                    grad = grad + signal(t, k, now["g"][k]) @ trace[k]
                    continue
                e = slope @ trace[k]
                read[k] = e if kappa is None or k not in kappa else kappa[k] * read[k] + e
                grad = grad + signal(t, k, back) @ read[k]
            states = now["states"]
        return self.f.as_tree(self.unravel(grad))

    def presynaptic(
        self,
        xs: list[Any],
        units: list[Units],
        leak: float,
        out: dict[int, float] | None = None,
        before: float = 0.0,
        after: float = 1.0,
        ahead: float = 0.0,
    ) -> dict[Any, Any]:
        """`g (after x' J + ahead x p)`, without any Jacobian; of groups in `out`, averages of both."""
        x_bar: dict[int, Any] = {}
        z_bar: dict[int, Any] = {}
        f_bar: dict[Any, Any] = {}
        past: dict[Any, Any] = {}
        states, grad, ones, twice = self.f.states, np.zeros_like(self.theta), 0.0, 0.0
        for x in xs:
            now = self.advance(states, x)
            grad, ones = grad + now["within"], leak * ones + 1
            for s, v in now["inputs"].items():
                x_bar[s] = v + (leak * x_bar[s] if s in x_bar else 0)
                z_bar[s] = x_bar[s] + (leak * z_bar[s] if s in z_bar else 0)
            twice = leak * twice + ones
            causal, other, on = (dict.fromkeys(self.traced, 0.0) for _ in range(3))
            for s, k in self.sites:
                grad = grad - (now["g"][k] @ now["J"][s, k]) @ now["dy"][s]
                back, slope = self.at_units(units[k], k, states, now["states"], x)
                f = slope @ now["J"][s, k]
                decay = (out or {}).get(k, 0.0)
                f_bar[s, k] = f + (decay * f_bar[s, k] if (s, k) in f_bar else 0)
                one_on, same = (f_bar[s, k] / ones, 0 * f) if decay else (0 * f, f_bar[s, k])
                on[s], causal[s] = on[s] + after * back @ one_on, causal[s] + after * back @ same
                other[s] = other[s] + ahead * back @ past.get((s, k), np.zeros_like(f))
                past[s, k] = before * (past.get((s, k), 0) + f)
            grad = grad + np.asarray(self._site_vjp(self.theta, states, x, x_bar, ones, causal))
            grad = grad + np.asarray(self._site_vjp(self.theta, states, x, now["inputs"], 1.0, other))
            grad = grad + np.asarray(self._site_vjp(self.theta, states, x, z_bar, twice, on))
            states = now["states"]
        return self.f.as_tree(self.unravel(grad))

    def at_units(self, units: Units, k: int, states: Any, new: Any, x: Any) -> tuple[Any, Any]:
        """dL/dz and dz/dh of what is read of a group."""
        return jax.tree.map(np.asarray, self._units(units, k, states, new, x))

    def _at_units(self, units: Units, k: int, states: Any, new: Any, x: Any) -> tuple[Any, Any]:
        params = dict(zip((p[-1] for p in self.f.param_paths), self.f.params, strict=True))
        by_name = lambda leaves: dict(zip((p[-1] for p in self.f.state_paths), leaves, strict=True))
        read = lambda flat: units.read(by_name(self._unflat(k, flat, new))).ravel()
        z = units.read(by_name(new))
        value = lambda d: loss(units.outs(params, by_name(states), x, {k: d}))
        return jax.grad(value)(jnp.zeros_like(z)).ravel(), jax.jacrev(read)(self._flat(k, new))

    def _whole(self, k: int, states: Any, x: Any) -> Any:
        return np.asarray(self._full(k, states, x))

    def _whole_jacobian(self, k: int, states: Any, x: Any) -> Any:
        f = self.f

        def step(flat: Any) -> Any:
            return self._flat(k, f.step(f.params, self._unflat(k, flat, states), x)[1])

        return jax.jacrev(step)(self._flat(k, states))

    def own_blocks(self, k: int, x: Any) -> Any:
        """`dh[t]/dh[t-1]` of a group along all paths, (new state, old state, position)."""
        places, full = self.groups[k][1], self._whole(k, self.f.states, x)
        # states of an array lie along an axis of its own or one after the other; positions tell them apart
        order = [np.flatnonzero(places == p) for p in range(places.max() + 1)]
        return np.stack([full[np.ix_(at, at)] for at in order], -1)

    def _site_outputs(
        self, theta: Any, states: Any, x: Any, inputs: Any = None, ones: Any = 1.0
    ) -> dict[int, Any]:
        """`y` of each site as a function of parameters alone, with its inputs given."""
        result, stop = {}, jax.lax.stop_gradient

        def at_site(number: int, eqn: Any, vals: Any) -> Any:
            n = len(vals) - len(eqn.params["names"])
            if number in self.traced:
                given = inputs.get(number) if inputs else None
                result[number] = _apply(eqn, [*map(stop, vals[:n])], vals[n:], given, ones)
            return stop(eqn.primitive.bind(*vals, **eqn.params))

        self.f.step(self.unravel(theta), states, x, at_site=at_site)
        return {s: y.ravel() for s, y in result.items()}

    def _pull_sites(self, theta: Any, states: Any, x: Any, x_bar: Any, ones: Any, dys: Any) -> Any:
        return jax.vjp(lambda t: self._site_outputs(t, states, x, x_bar, ones), theta)[1](dys)[0]

    def _through_window(self, theta: Any, states: Any, chunk: Any) -> tuple[Any, list[Any]]:
        def total(theta: Any, flats: Any) -> Any:
            now = states
            for k, flat in enumerate(flats):
                now = self._unflat(k, flat, now)
            return self._run(theta, now, chunk)[1]

        return jax.grad(total, (0, 1))(theta, [self._flat(k, states) for k in range(len(self.groups))])


def _basis(columns: Any, start: Any) -> Any:
    """An orthonormal basis of some columns; a little of `start` stands in for those that are lost."""
    little = np.sqrt(np.finfo(np.float64).eps)
    q, r = np.linalg.qr(_unit(columns) + little * start)
    return q * np.sign(np.diag(r))


def _unit(columns: Any) -> Any:
    length = np.linalg.norm(columns, axis=0)
    return columns / np.where(length == 0, 1, length)


def _input_of(eqn: Any, vals: Any) -> Any:
    """What ES-D-RTRL averages: the op's input, or which row an index picks."""
    n = len(vals) - len(eqn.params["names"])
    if n == 0:
        return None
    if jnp.issubdtype(vals[0].dtype, jnp.inexact):
        return vals[0]
    if eqn.primitive.name == "etp_embedding":
        return jax.nn.one_hot(vals[0], vals[-1].shape[0], dtype=vals[-1].dtype)
    return vals[0].astype(vals[-1].dtype)


def _apply(eqn: Any, inputs: Any, weights: Any, given: Any, ones: Any) -> Any:
    """The op at a given input, with weights that meet a constant one scaled by `ones`."""
    names = eqn.params["names"]
    scaled = [w * ones if name == "bias" or not inputs else w for name, w in zip(names, weights, strict=True)]
    if given is None:
        return eqn.primitive.bind(*inputs, *scaled, **eqn.params)
    if eqn.primitive.name == "etp_embedding":
        return given @ scaled[0]
    return eqn.primitive.bind(given, *inputs[1:], *scaled, **eqn.params)
