"""Classes of an older release: the same values and the same gradients as the line that replaces them."""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import brainevent
import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt

rng = np.random.RandomState(0)
X, W, B = (jnp.asarray(rng.randn(*shape)) for shape in ((2, 3), (3, 4), (4,)))
MASK = jnp.asarray(rng.rand(3, 4) > 0.4, float)
SPARSE = brainevent.CSR.fromdense(W * MASK)
KERNEL = jnp.asarray(rng.randn(4, 3, 2))
LORA = {"B": W[:, :2], "A": W[:2], "bias": B}
SIGNAL = jnp.asarray(rng.randn(2, 3, 5))
STRUCT = jax.ShapeDtypeStruct((2, 3, 5), float)

OPS: dict[str, tuple[Callable[[], Any], Any, Any, Callable[[Any], Any]]] = {
    "MatMulOp": (
        lambda: bt.MatMulOp(),
        X,
        {"weight": W, "bias": B},
        lambda w: bt.matmul(X, w["weight"], w["bias"]),
    ),
    "MatMulOp, masked": (
        lambda: bt.MatMulOp(MASK, jnp.cos),
        X,
        {"weight": W},
        lambda w: bt.matmul(X, jnp.cos(w["weight"] * MASK)),
    ),
    "MatMulOp, masked last": (
        lambda: bt.MatMulOp(MASK, jnp.cos, apply_weight_fn_before_mask=True),
        X,
        {"weight": W},
        lambda w: bt.matmul(X, jnp.cos(w["weight"]) * MASK),
    ),
    "ElemWiseOp": (lambda: bt.ElemWiseOp(jnp.tanh), None, B, lambda w: bt.element_wise(w, jnp.tanh)),
    "ConvOp": (
        lambda: bt.ConvOp(STRUCT, (2,), "SAME", weight_fn=jnp.tanh),
        SIGNAL,
        {"weight": KERNEL, "bias": B},
        lambda w: bt.conv(SIGNAL, jnp.tanh(w["weight"]), w["bias"], strides=(2,), padding="SAME"),
    ),
    "SpMatMulOp": (
        lambda: bt.SpMatMulOp(SPARSE),
        X,
        {"weight": SPARSE.data, "bias": B},
        lambda w: bt.sparse_matmul(X, w["weight"], sparse_mat=SPARSE, bias=w["bias"]),
    ),
    "LoraOp": (
        lambda: bt.LoraOp(0.5),
        X,
        LORA,
        lambda w: bt.lora_matmul(X, w["B"], w["A"], alpha=0.5, bias=w["bias"]),
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_op(name: str) -> None:
    build, x, weights, new = OPS[name]
    with pytest.warns(DeprecationWarning, match=re.escape("Instead: `braintrace.")) as said:
        op = build()
    assert said[0].filename == __file__
    call = (lambda w: op(w)) if name == "ElemWiseOp" else (lambda w: op(x, w))
    np.testing.assert_array_equal(call(weights), new(weights))
    assert "etp_" in str(jax.make_jaxpr(call)(weights))
    with pytest.warns(DeprecationWarning, match="NonTempParam"):
        plain = bt.NonTempParam(weights, op)
    np.testing.assert_allclose(plain.execute(x), new(weights), rtol=1e-12)
    assert "etp_" not in str(jax.make_jaxpr(plain.execute)(x))


class Old(brainstate.nn.Module):
    """A leaky net written with parameters that hold their operations."""

    def __init__(self) -> None:
        super().__init__()
        self.w = bt.ETraceParam({"weight": W, "bias": B}, op=bt.MatMulOp(weight_mask=MASK))
        self.leak = bt.ElemWiseParam(B, jax.nn.sigmoid)
        self.out = bt.NonTempParam({"weight": W.T}, bt.MatMulOp())

    def init_state(self, batch_size: int | None = None) -> None:
        self.h = brainstate.HiddenState(jnp.zeros((2, 4)))

    def update(self, x: Any) -> Any:
        leak = jnp.broadcast_to(self.leak.execute(), (2, 4))
        self.h.value = leak * self.h.value + jnp.tanh(self.w.execute(x))
        return self.out.execute(self.h.value)


class New(Old):
    """The same by the lines that the warnings show."""

    def __init__(self) -> None:
        brainstate.nn.Module.__init__(self)
        self.w = brainstate.ParamState({"weight": W, "bias": B})
        self.leak = brainstate.ParamState(B)
        self.out = brainstate.ParamState({"weight": W.T})

    def update(self, x: Any) -> Any:
        w = self.w.value
        leak = jnp.broadcast_to(bt.element_wise(self.leak.value, jax.nn.sigmoid), (2, 4))
        self.h.value = leak * self.h.value + jnp.tanh(bt.matmul(x, w["weight"] * MASK, w["bias"]))
        return self.h.value @ self.out.value["weight"]


def test_a_model_written_both_ways_has_the_same_gradient() -> None:
    xs = jnp.asarray(rng.randn(5, 2, 3))
    with warnings.catch_warnings(record=True, action="always") as said:
        old = Old()
    assert any("Instead: `w = brainstate.ParamState(weight)`, and" in str(w.message) for w in said)
    with pytest.warns(DeprecationWarning, match="leave it out"):
        policy = bt.ControlFlowPolicy(cond="convert")
    found = []
    for model in (old, New()):
        learner = bt.compile(model, bt.D_RTRL, xs[0], control_flow=policy)
        learner = copy.deepcopy(learner)
        assert set(learner.report.etrace_weights) == {("w",), ("leak",)}
        found.append(learner.etrace_grad(xs, step_fn=lambda x, call=learner: jnp.sum(call(x) ** 2)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), *found)


class Overwritten(brainstate.nn.Module):
    """A hidden state that a step writes and never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.w = brainstate.ParamState(W)
        self.h = brainstate.HiddenState(jnp.zeros((2, 4)))

    def update(self, x: Any) -> Any:
        self.h.value = jnp.tanh(bt.matmul(x, self.w.value))
        return self.h.value


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl"])
def test_a_state_that_is_never_read_is_no_error(rule: str) -> None:
    expected = pytest.warns(UserWarning, match="writes `h` and never reads it")
    with expected if rule == "d_rtrl" else warnings.catch_warnings(action="error"):
        learner = bt.compile(Overwritten(), rule, X)
    check = bt.check_gradients(learner, jnp.stack([X, 2 * X]), step_fn=lambda x: jnp.sum(learner(x) ** 2))
    assert check.equal
    assert check.exactness.exact


def test_configs_and_patterns_of_published_rules() -> None:
    with warnings.catch_warnings(action="ignore"):
        learner = bt.compile(Overwritten(), "eprop", X, feedback="random", kappa_filter_decay=0.5)
    assert learner.config == bt.ETraceConfig(
        learning_signal="random_feedback", trace_filter="kappa", kappa=0.5
    )
    assert [group.snap for group in learner.graph.hidden_groups] == [None]
    assert bt.EProp(Overwritten()).config == bt.ETraceConfig()
    assert bt.ES_D_RTRL(Overwritten(), 3).config == bt.ETraceConfig("io_factorized", decay=0.5)
    assert bt.SnAp(Overwritten(), 2).config == bt.ETraceConfig(recurrence_scope="sparse_n", sparse_n=2)
