"""Classes of an older release: a parameter that holds its operation, `w.execute(x)`.

Each wraps a marked operation on a `brainstate.ParamState`, and warns of it when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import brainstate

from ._lines import warn_user
from ._ops import conv, element_wise, lora_matmul, matmul, sparse_matmul
from ._ops.primitive import without_marks
from ._types import ArrayLike, Options, PyTree, Shape, Value

WeightFunction = Callable[[Value], Value]


def _identity(w: Value) -> Value:
    return w


def _warn(old: object, new: str) -> None:
    warn_user(
        f"`braintrace.{type(old).__name__}` is of an older release. Instead: {new}.", DeprecationWarning
    )


class ETraceOp:
    """How a parameter enters: `op(x, weights)`, where `weights` is a dictionary."""

    new = "call a marked operation, such as `braintrace.matmul(x, w.value)`"

    def __init__(self) -> None:
        _warn(self, self.new)

    def __call__(self, x: PyTree, weights: PyTree) -> PyTree:
        return self.xw_to_y(x, weights)

    def xw_to_y(self, x: PyTree, weights: PyTree) -> PyTree:
        raise NotImplementedError


class MatMulOp(ETraceOp):
    """`matmul(x, weights["weight"], weights["bias"])`; the weight is masked, then `weight_fn` is applied."""

    new = "`braintrace.matmul(x, w['weight'], w.get('bias'))`"

    def __init__(
        self,
        weight_mask: ArrayLike | None = None,
        weight_fn: WeightFunction = _identity,
        apply_weight_fn_before_mask: bool = False,
    ) -> None:
        super().__init__()
        self.weight_mask, self.weight_fn = weight_mask, weight_fn
        self.apply_weight_fn_before_mask = apply_weight_fn_before_mask

    def xw_to_y(self, x: PyTree, weights: PyTree) -> PyTree:
        mask = _identity if self.weight_mask is None else lambda w: w * self.weight_mask
        first, last = (self.weight_fn, mask) if self.apply_weight_fn_before_mask else (mask, self.weight_fn)
        return matmul(x, last(first(weights["weight"])), weights.get("bias"))


class ElemWiseOp(ETraceOp):
    """`element_wise(weights, fn)`; it takes no input."""

    new = "`braintrace.element_wise(w, fn)`"

    def __init__(self, fn: WeightFunction = _identity) -> None:
        super().__init__()
        self.fn = fn

    def __call__(self, weights: PyTree) -> PyTree:  # type: ignore[override]
        return self.xw_to_y(None, weights)

    def xw_to_y(self, x: PyTree, weights: PyTree) -> PyTree:
        return element_wise(weights, self.fn)


class ConvOp(ETraceOp):
    """`conv(x, weights["weight"], weights["bias"], ...)`; `xinfo` is not needed."""

    new = "`braintrace.conv(x, w['weight'], w.get('bias'), strides=window_strides, padding=padding)`"

    def __init__(
        self,
        xinfo: object,
        window_strides: Shape,
        padding: str | Sequence[tuple[int, int]],
        lhs_dilation: Shape | None = None,
        rhs_dilation: Shape | None = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        dimension_numbers: object = None,
        weight_mask: ArrayLike | None = None,
        weight_fn: WeightFunction = _identity,
    ) -> None:
        super().__init__()
        self.weight_mask, self.weight_fn = weight_mask, weight_fn
        self.options: Options = {
            "strides": window_strides,
            "padding": padding,
            "lhs_dilation": lhs_dilation,
            "rhs_dilation": rhs_dilation,
            "feature_group_count": feature_group_count,
            "batch_group_count": batch_group_count,
            "dimension_numbers": dimension_numbers,
        }

    def xw_to_y(self, x: PyTree, weights: PyTree) -> PyTree:
        kernel = weights["weight"] if self.weight_mask is None else weights["weight"] * self.weight_mask
        return conv(x, self.weight_fn(kernel), weights.get("bias"), **self.options)


class SpMatMulOp(ETraceOp):
    """`sparse_matmul(x, weights["weight"], sparse_mat=sparse_mat)`."""

    new = "`braintrace.sparse_matmul(x, w['weight'], sparse_mat=sparse_mat, bias=w.get('bias'))`"

    def __init__(self, sparse_mat: PyTree, weight_fn: WeightFunction = _identity) -> None:
        super().__init__()
        self.sparse_mat, self.weight_fn = sparse_mat, weight_fn

    def xw_to_y(self, x: PyTree, weights: PyTree) -> PyTree:
        data = self.weight_fn(weights["weight"])
        return sparse_matmul(x, data, sparse_mat=self.sparse_mat, bias=weights.get("bias"))


class LoraOp(ETraceOp):
    """`lora_matmul(x, weights["B"], weights["A"], alpha=alpha)`."""

    new = "`braintrace.lora_matmul(x, w['B'], w['A'], alpha=alpha, bias=w.get('bias'))`"

    def __init__(self, alpha: float | None = None) -> None:
        super().__init__()
        self.alpha = 1.0 if alpha is None else alpha

    def xw_to_y(self, x: PyTree, weights: PyTree) -> PyTree:
        return lora_matmul(x, weights["B"], weights["A"], alpha=self.alpha, bias=weights.get("bias"))


class ETraceParam(brainstate.ParamState):
    """A parameter that is learned online through its operation; `grad` has no effect."""

    def __init__(self, weight: PyTree, op: ETraceOp, grad: object = None, name: str | None = None) -> None:
        _warn(self, f"`w = brainstate.ParamState(weight)`, and with `w.value` for w: {op.new}")
        super().__init__(weight, name=name)
        self.op = op

    def execute(self, x: PyTree) -> PyTree:
        return self.op(x, self.value)


class ElemWiseParam(brainstate.ParamState):
    """A parameter that is learned online, element by element."""

    def __init__(
        self, weight: PyTree, op: ElemWiseOp | WeightFunction = _identity, name: str | None = None
    ) -> None:
        _warn(self, "`w = brainstate.ParamState(weight)` and `braintrace.element_wise(w.value, fn)`")
        super().__init__(weight, name=name)
        self.op = op.fn if isinstance(op, ElemWiseOp) else op

    def execute(self) -> PyTree:
        return element_wise(self.value, self.op)


class NonTempParam(brainstate.ParamState):
    """A parameter that gets the gradient within the step only: its operation leaves no mark."""

    def __init__(
        self, value: PyTree, op: ETraceOp | Callable[[Value, PyTree], Value], name: str | None = None
    ) -> None:
        _warn(self, "`w = brainstate.ParamState(value)` and an ordinary operation, `x @ w.value['weight']`")
        super().__init__(value, name=name)
        self.op = op

    def execute(self, x: PyTree) -> PyTree:
        apply = self.op.xw_to_y if isinstance(self.op, ETraceOp) else self.op
        with without_marks():
            return apply(x, self.value)


class ControlFlowPolicy:
    """How 0.2.x was to read control flow; learners take it as `control_flow=`, without effect."""

    def __init__(self, **options: object) -> None:
        _warn(self, "leave it out, since `cond` and `scan` are read through as they are")
        self.options = options
