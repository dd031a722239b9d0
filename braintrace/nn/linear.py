"""Dense, sparse, grouped and low-rank products with weights that are learned online."""

from __future__ import annotations

from typing import Any

import brainstate
import brainunit as u
import jax
from brainstate.nn import init

from .._ops import grouped_matmul, lora_matmul, matmul, sparse_matmul
from .._types import Initializer, Model, PyTree, Shape, Size, Value


class Linear(brainstate.nn.Linear):
    """`y = x @ weight + bias`, with `w_mask` times the weight where one is given.

    >>> import jax.numpy as jnp
    >>> Linear(3, 2)(jnp.ones((5, 3))).shape
    (5, 2)
    """

    def update(self, x: Value) -> Value:
        params = self.weight.value
        weight = params["weight"] if self.w_mask is None else params["weight"] * self.w_mask
        return matmul(x, weight, params.get("bias"))


class SignedWLinear(brainstate.nn.SignedWLinear):
    """`y = x @ (|weight| * w_sign)`: training does not change the sign of a weight.

    `w_sign` broadcasts against the weight (in, out); a column (in, 1) of ones and minus ones makes units
    excitatory or inhibitory (Dale's law). By default all weights are positive.

    >>> import jax.numpy as jnp
    >>> layer = SignedWLinear(2, 1, w_init=jnp.array([[-3.0], [2.0]]), w_sign=jnp.array([[1.0], [-1.0]]))
    >>> layer(jnp.ones(2)).tolist()
    [1.0]
    """

    def update(self, x: Value) -> Value:
        weight = u.math.abs(self.weight.value)
        return matmul(x, weight if self.w_sign is None else weight * self.w_sign)


class ScaledWSLinear(brainstate.nn.ScaledWSLinear):
    """`y = x @ standardised(weight) * gain + bias`: each unit's weights have mean zero, variance 1/in.

    >>> import jax.numpy as jnp
    >>> ScaledWSLinear(3, 2)(jnp.ones((5, 3))).shape
    (5, 2)
    """

    def update(self, x: Value) -> Value:
        params = self.weight.value
        weight = brainstate.nn.weight_standardization(params["weight"], self.eps, params.get("gain"))
        if self.w_mask is not None:
            weight = weight * self.w_mask
        return matmul(x, weight, params.get("bias"))


class SparseLinear(brainstate.nn.Module):
    """`y = x @ M + bias`, where only the stored entries of `M` (in, out) are weights.

    `spar_mat` is a CSR, CSC, COO, BCOO or BCSR matrix of `brainevent`, `brainunit.sparse` or
    `jax.experimental.sparse`; its entries are the initial weights.

    >>> import jax.numpy as jnp
    >>> from jax.experimental.sparse import BCSR
    >>> layer = SparseLinear(BCSR.fromdense(jnp.array([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])))
    >>> layer(jnp.ones(3)).tolist()
    [4.0, 2.0]
    >>> layer.weight.value["weight"].shape
    (3,)
    """

    def __init__(
        self,
        spar_mat: PyTree,
        b_init: Initializer = None,
        in_size: Any = None,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ) -> None:
        super().__init__(name=name)
        self.in_size = spar_mat.shape[0] if in_size is None else in_size
        self.out_size = (*self.in_size[:-1], spar_mat.shape[1])
        if self.in_size[-1] != spar_mat.shape[0]:
            raise ValueError(
                f"`in_size` {self.in_size} must end with the rows of the matrix, {spar_mat.shape[0]}."
            )
        self.spar_mat = spar_mat
        params = {"weight": spar_mat.data}
        if b_init is not None:
            params["bias"] = init.param(b_init, self.out_size[-1], allow_none=False)
        self.weight = param_type(params)

    def update(self, x: Value) -> Value:
        params = self.weight.value
        return sparse_matmul(x, params["weight"], sparse_mat=self.spar_mat, bias=params.get("bias"))


class GroupedLinear(brainstate.nn.Module):
    """One product for each group, `y[..., g, :] = x[..., g, :] @ weight[g] + bias[g]`.

    x is (..., groups, in), weight (groups, in, out), bias (groups, out). An initialiser is called once for
    each group, with (in, out).

    >>> import jax.numpy as jnp
    >>> GroupedLinear(4, 8, 2)(jnp.ones((16, 4, 8))).shape
    (16, 4, 2)
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        w_init: Initializer = init.KaimingNormal(),
        b_init: Initializer = init.ZeroInit(),
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ) -> None:
        super().__init__(name=name)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.in_size = (num_groups, in_features)
        self.out_size = (num_groups, out_features)
        params = {"weight": self._each(w_init, (in_features, out_features))}
        if b_init is not None:
            params["bias"] = self._each(b_init, (out_features,))
        self.weight = param_type(params)

    def _each(self, initial: Initializer, shape: Shape) -> Value:
        if callable(initial):
            return u.math.stack([initial(shape) for _ in range(self.num_groups)])
        return u.math.broadcast_to(initial, (self.num_groups, *shape))

    def update(self, x: Value) -> Value:
        return grouped_matmul(x, **self.weight.value)


class LoRA(brainstate.nn.LoRA):
    """`y = scale * x @ lora_a @ lora_b + base_module(x)`, the base frozen: its parameters get no gradient.

    >>> import jax.numpy as jnp
    >>> layer = LoRA(3, 1, 2, base_module=Linear(3, 2))
    >>> layer(jnp.ones((5, 3))).shape
    (5, 2)
    """

    __call__ = brainstate.nn.Module.__call__

    def __init__(
        self,
        in_features: int,
        lora_rank: int,
        out_features: int,
        *,
        base_module: Model = None,
        kernel_init: Initializer = init.LecunNormal(),
        param_type: type = brainstate.ParamState,
        in_size: Size | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__(
            in_features,
            lora_rank,
            out_features,
            base_module=base_module,
            kernel_init=kernel_init,
            param_type=param_type,
            in_size=in_size,
        )
        self.scale = scale

    def update(self, x: Value) -> Value:
        params = self.weight.value
        y = lora_matmul(x, params["lora_a"], params["lora_b"], alpha=self.scale)
        return y if self.base_module is None else y + frozen(self.base_module, x)


def frozen(module: Model, x: Value) -> Value:
    """`module(x)` with no gradient for its parameters; `x` gets its own."""
    found = module.states(brainstate.ParamState).values() if hasattr(module, "states") else ()
    states = [(state, state.value) for state in found]
    for state, value in states:
        state.restore_value(jax.tree.map(jax.lax.stop_gradient, value))
    try:
        return module(x)
    finally:
        for state, value in states:
            state.restore_value(value)
