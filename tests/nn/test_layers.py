"""Every layer that `brainstate.nn` has computes the same, and learns the same through time.

One table of layers, each built by both packages with the parameters copied across; then what is our own.
"""

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import brainevent
import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR

import braintrace as bt
from braintrace import nn
from tests.oracle import loss
from tests.run import every

INITIALISERS = {"w_init", "kernel_init", "embedding_init"}
rng = np.random.RandomState(0)
MASK = rng.rand(3, 4) > 0.3
DENSE = jnp.asarray(np.where(rng.rand(3, 4) > 0.5, rng.randn(3, 4), 0.0))


@dataclass(frozen=True)
class Layer:
    """How to build a layer by its name, and the shape of an input without a batch."""

    name: str
    args: tuple[Any, ...]
    x: tuple[int, ...] = (3,)
    options: dict[str, Any] = field(default_factory=dict)
    indices: int = 0  # x is integers below this
    split: Callable[[dict[Any, Any]], dict[Any, Any]] = dict  # their parameters as ours
    learns: bool = True  # rightly so in brainstate

    def build(self, package: Any) -> Any:
        cls = getattr(package, self.name)
        zeros = {
            k: brainstate.nn.init.ZeroInit() for k in INITIALISERS & {*inspect.signature(cls).parameters}
        }
        layer = cls(*self.args, **{**zeros, **self.options})
        for i, state in enumerate(layer.states(brainstate.ParamState).values()):
            draw = np.random.RandomState(i)
            state.value = jax.tree.map(
                lambda v, draw=draw: jnp.asarray(v + draw.randn(*v.shape)), state.value
            )
        return layer

    def inputs(self, batch: int | None) -> list[Any]:
        shape = self.x if batch is None else (batch, *self.x)
        steps = 3 if self.name.endswith("Cell") else 1
        if self.indices:
            return [jnp.asarray(rng.randint(0, self.indices, shape)) for _ in range(steps)]
        return [jnp.asarray(rng.randn(*shape)) for _ in range(steps)]


def gates(params: dict[Any, Any]) -> dict[Any, Any]:
    """The parameters of a GRU, its two gates apart."""
    both = params.pop(("Wrz", "weight"))
    for i, name in enumerate(("Wr", "Wz")):
        params[name, "weight"] = {k: jnp.split(v, 2, -1)[i] for k, v in both.items()}
    return params


def layers(*args: Any, **kinds: Layer) -> dict[str, Layer]:
    return kinds


ones = brainstate.nn.init.Constant(1.0)
LAYERS = layers(
    linear=Layer("Linear", (3, 4)),
    linear_masked=Layer("Linear", (3, 4), options={"w_mask": jnp.asarray(MASK, float), "b_init": None}),
    linear_of_two_axes=Layer("Linear", ((2, 3), (2, 4)), (2, 3)),
    signed=Layer("SignedWLinear", (3, 4)),
    signed_by_row=Layer("SignedWLinear", (3, 4), options={"w_sign": jnp.asarray([[1.0], [-1.0], [1.0]])}),
    scaled=Layer("ScaledWSLinear", (3, 4)),
    scaled_without_gain=Layer("ScaledWSLinear", (3, 4), options={"ws_gain": False, "b_init": None}),
    # the derivative of `x @ M` in brainunit 0.5 has rows for columns; ours is tested against a dense one
    sparse_csr=Layer("SparseLinear", (u.sparse.CSR.fromdense(DENSE),), learns=False),
    sparse_coo=Layer(
        "SparseLinear", (u.sparse.COO.fromdense(DENSE),), options={"b_init": ones}, learns=False
    ),
    lora=Layer("LoRA", (3, 2, 4)),
    embedding=Layer("Embedding", (5, 4), (), indices=5),
    embedding_of_words=Layer("Embedding", (5, (2, 3)), (4,), indices=5),
    embedding_padded=Layer("Embedding", (5, 4), (6,), {"padding_idx": 1}, indices=5),
    embedding_by_frequency=Layer("Embedding", (5, 4), (6,), {"scale_grad_by_freq": True}, indices=5),
    embedding_shortened=Layer("Embedding", (5, 4), (6,), {"max_norm": 0.5}, indices=5),
    embedding_frozen=Layer("Embedding", (5, 4), (6,), {"freeze": True}, indices=5),
    conv1d=Layer("Conv1d", ((6, 2), 4, 3), (6, 2), {"b_init": ones}),
    conv1d_strided=Layer("Conv1d", ((7, 2), 4, 3), (7, 2), {"stride": 2, "padding": "VALID"}),
    conv2d=Layer("Conv2d", ((4, 5, 2), 4, (2, 3)), (4, 5, 2), {"padding": ((1, 0), (0, 2))}),
    conv2d_grouped=Layer("Conv2d", ((4, 5, 4), 6, 3), (4, 5, 4), {"groups": 2, "rhs_dilation": 2}),
    conv2d_dilated=Layer("Conv2d", ((4, 5, 2), 3, 2), (4, 5, 2), {"lhs_dilation": 2, "padding": 1}),
    conv2d_masked=Layer("Conv2d", ((4, 5, 1), 2, 2), (4, 5, 1), {"w_mask": jnp.eye(2)[..., None, None]}),
    conv2d_channels_first=Layer(
        "Conv2d", ((2, 4, 5), 3, 3), (2, 4, 5), {"channel_first": True, "b_init": ones}
    ),
    conv3d=Layer("Conv3d", ((3, 4, 3, 2), 2, 2), (3, 4, 3, 2), {"b_init": ones}),
    valina=Layer("ValinaRNNCell", (3, 4), options={"activation": "tanh"}),
    gru=Layer("GRUCell", (3, 4), split=gates),
    mgu=Layer("MGUCell", (3, 4)),
    lstm=Layer("LSTMCell", (3, 4)),
    urlstm=Layer("URLSTMCell", (3, 4), options={"activation": jnp.sin}),
)


def params_of(layer: Any) -> dict[Any, Any]:
    return {k: state.value for k, state in layer.states(brainstate.ParamState).items()}


def run(layer: Any, xs: list[Any], batch: int | None) -> tuple[Any, Any]:
    """The outputs of all steps and the gradient through all of them."""
    brainstate.nn.init_all_states(layer, batch_size=batch)

    def total() -> Any:
        outs = [layer(x) for x in xs]
        return loss(outs), outs

    grad = brainstate.transform.grad(total, layer.states(brainstate.ParamState), has_aux=True)
    grads, outs = brainstate.transform.jit(grad)()
    return outs, dict(grads)


def assert_close(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert p.shape == q.shape
        assert p.dtype == q.dtype
        np.testing.assert_allclose(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("name", every(6, LAYERS))
def test_same_as_brainstate(name: str, batch: int | None) -> None:
    case = LAYERS[name]
    with jax.numpy_rank_promotion("allow"):  # brainstate relies on it
        theirs, ours = case.build(brainstate.nn), case.build(nn)
        given = case.split(params_of(theirs))
        assert {k: jax.tree.map(jnp.shape, v) for k, v in given.items()} == {
            k: jax.tree.map(jnp.shape, v) for k, v in params_of(ours).items()
        }
        for key, state in ours.states(brainstate.ParamState).items():
            state.value = given[key]
        xs = case.inputs(batch)
        outs, grads = run(theirs, xs, batch)
        our_outs, our_grads = run(ours, xs, batch)
    assert ours.in_size == theirs.in_size or "sparse" in name  # whose in_size they leave open
    assert ours.out_size == theirs.out_size
    assert_close(our_outs, outs)
    if case.learns:
        assert_close(our_grads, case.split(grads))
    if isinstance(ours, brainstate.nn.RNNCell):
        assert_close(
            *({k: s.value for k, s in m.states(brainstate.HiddenState).items()} for m in (ours, theirs))
        )


@pytest.mark.parametrize("name", dict.fromkeys(case.name for case in LAYERS.values()))
def test_same_arguments_and_defaults(name: str) -> None:
    def arguments(package: Any) -> list[Any]:
        given = inspect.signature(getattr(package, name).__init__).parameters.values()
        return [
            (p.name, p.kind, p.default if isinstance(p.default, DATA) else type(p.default))
            for p in given
            if p.name != "scale"  # only ours has it
        ]

    assert arguments(nn) == arguments(brainstate.nn)


DATA = int | float | str | bool | type | None


@pytest.mark.parametrize("name", ["valina", "mgu", "lstm", "urlstm", "linear", "conv2d", "embedding"])
def test_same_seed_same_parameters(name: str) -> None:
    case = LAYERS[name]
    values = []
    for package in (nn, brainstate.nn):
        brainstate.random.seed(7)
        with jax.numpy_rank_promotion("allow"):
            values.append(params_of(getattr(package, case.name)(*case.args, **case.options)))
    assert_close(*values)


@pytest.mark.parametrize(
    "name", every(2, [k for k in LAYERS if k not in ("valina", "gru", "mgu", "lstm", "urlstm")])
)
@pytest.mark.filterwarnings("ignore:.*The model has no marked op")
def test_is_marked(name: str) -> None:
    """The layer's parameters are learned online where it feeds a state; unless it is frozen."""

    class Leaky(brainstate.nn.Module):
        def __init__(self, layer: Any, y: Any) -> None:
            super().__init__()
            self.layer, self.h = layer, brainstate.HiddenState(jnp.zeros(y.shape))

        def update(self, x: Any) -> Any:
            self.h.value = 0.9 * self.h.value + jnp.tanh(self.layer(x))
            return self.h.value

    case = LAYERS[name]
    with jax.numpy_rank_promotion("allow"):
        layer = case.build(nn)
    (x, *_) = case.inputs(2)
    learner = bt.D_RTRL(Leaky(layer, layer(x)))
    learner.compile_graph(x)
    paths = {p for r in learner.graph.hidden_param_op_relations for p in r.trainable_paths.values()}
    assert paths == (set() if name == "embedding_frozen" else {("layer", "weight")})
    assert all(r.complete for r in learner.graph.hidden_param_op_relations)


# -- what is our own -----------------------------------------------------------------------------------


SPARSE = {
    "brainevent_csr": brainevent.CSR.fromdense,
    "brainevent_csc": brainevent.CSC.fromdense,
    "brainunit_csr": u.sparse.CSR.fromdense,
    "brainunit_csc": u.sparse.CSC.fromdense,
    "brainunit_coo": u.sparse.COO.fromdense,
    "BCOO": BCOO.fromdense,
    "BCSR": BCSR.fromdense,
}


@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_linear_of_each_kind(kind: str) -> None:
    layer = nn.SparseLinear(SPARSE[kind](DENSE), b_init=brainstate.nn.init.Constant(2.0))
    dense = nn.Linear(3, 4, w_init=DENSE, w_mask=jnp.asarray(DENSE != 0, float), b_init=2.0 * jnp.ones(4))
    assert (layer.in_size, layer.out_size) == ((3,), (4,))
    xs = [jnp.asarray(rng.randn(2, 3))]
    (outs, grads), (dense_outs, dense_grads) = run(layer, xs, 2), run(dense, xs, 2)
    assert_close(outs, dense_outs)
    entries = dense_grads["weight",]["weight"][jnp.nonzero(DENSE)]
    np.testing.assert_allclose(jnp.sort(grads["weight",]["weight"]), jnp.sort(entries))
    assert_close(grads["weight",]["bias"], dense_grads["weight",]["bias"])
    with pytest.raises(ValueError, match="rows of the matrix"):
        nn.SparseLinear(layer.spar_mat, in_size=5)


def test_grouped_linear() -> None:
    layer = nn.GroupedLinear(2, 3, 4)
    w, b = layer.weight.value["weight"], layer.weight.value["bias"]
    assert (w.shape, b.shape, layer.in_size, layer.out_size) == ((2, 3, 4), (2, 4), (2, 3), (2, 4))
    assert not jnp.allclose(w[0], w[1])
    x = jnp.asarray(rng.randn(5, 2, 3))
    np.testing.assert_allclose(layer(x)[:, 1], x[:, 1] @ w[1] + jnp.tile(b[1:], (5, 1)))
    given = nn.GroupedLinear(2, 3, 4, w_init=np.ones((2, 3, 4)), b_init=None, param_type=brainstate.FakeState)
    np.testing.assert_allclose(given(x), jnp.repeat(x.sum(-1, keepdims=True), 4, -1))


def test_lora_leaves_the_base_as_it_is() -> None:
    base = nn.Linear(3, 4)
    layer = nn.LoRA(3, 2, 4, base_module=base)
    x = jnp.asarray(rng.randn(2, 3))
    params = layer.weight.value
    np.testing.assert_allclose(layer(x), x @ params["lora_a"] @ params["lora_b"] + base(x))
    states = layer.states(brainstate.ParamState)
    before = base.weight.value

    @brainstate.transform.jit
    def grads(x: Any) -> Any:
        f = brainstate.transform.grad(lambda x: jnp.sum(layer(x) ** 2), states, argnums=0)
        return f(x)

    of_params, of_x = grads(x)
    assert all(not jnp.any(g) for g in jax.tree.leaves(of_params["base_module", "weight"]))
    assert all(jnp.all(g != 0) for g in jax.tree.leaves(of_params["weight",]))
    full = params["lora_a"] @ params["lora_b"] + before["weight"]
    np.testing.assert_allclose(of_x, 2 * layer(x) @ full.T)
    assert base.weight.value is before
    scaled = nn.LoRA(3, 2, 4, scale=0.5)
    scaled.weight.value = params
    np.testing.assert_allclose(2 * scaled(x), layer(x) - base(x))


def test_signs_stay_through_training() -> None:
    sign = jnp.asarray([[1.0], [-1.0], [1.0]])
    layer = nn.SignedWLinear(3, 4, w_sign=sign)
    states = layer.states(brainstate.ParamState)

    @brainstate.transform.jit
    def step(x: Any) -> None:
        grads = brainstate.transform.grad(lambda: jnp.sum((layer(x) + 3.0) ** 2), states)()
        for key, g in grads.items():
            states[key].value = states[key].value - 0.3 * g

    for _ in range(20):
        step(jnp.asarray(rng.randn(5, 3)))
        effective = layer(jnp.eye(3))
        assert jnp.all(effective * jnp.broadcast_to(sign, effective.shape) >= 0)


@pytest.mark.parametrize("rank", every(3, [1, 2, 3]))
def test_conv_with_channels_first(rank: int) -> None:
    name, space = f"Conv{rank}d", (5, 6, 4)[:rank]
    layer = getattr(nn, name)(2, 3, kernel_size=3, padding="VALID", rhs_dilation=1, b_init=ones)
    last = getattr(nn, name)((*space, 2), 3, kernel_size=3, padding="VALID", b_init=ones)
    last.weight.value = {
        "weight": layer.weight.value["weight"],
        "bias": layer.weight.value["bias"].reshape(*([1] * rank), 3),
    }
    x = jnp.asarray(rng.randn(2, 2, *space))
    np.testing.assert_allclose(layer(x), jnp.moveaxis(last(jnp.moveaxis(x, 1, -1)), -1, 1))
    np.testing.assert_allclose(layer(x[0]), layer(x)[0])
    assert layer(jnp.zeros((2, *(9 for _ in space)))).shape == (3, *(7 for _ in space))
    with pytest.raises(ValueError, match="channels first"):
        layer(jnp.zeros((2, *space, 3)))


def test_conv_of_the_contract() -> None:
    assert nn.Conv2d(1, 8, kernel_size=3, padding="SAME")(jnp.zeros((1, 28, 28))).shape == (8, 28, 28)
    assert nn.Conv2d((28, 28, 1), 8, kernel_size=3)(jnp.zeros((28, 28, 1))).shape == (28, 28, 8)
    assert nn.Conv2d(4, 8, 3, groups=2, stride=2, rhs_dilation=2)(jnp.zeros((4, 9, 9))).shape == (8, 5, 5)


def test_units_pass_through() -> None:
    layer = nn.Linear(
        3, 4, w_init=brainstate.nn.init.KaimingNormal(unit=u.mV), b_init=1.0 * u.mV * np.ones(4)
    )
    assert u.get_unit(layer(jnp.ones(3))) == u.mV
    assert u.get_unit(nn.SignedWLinear(3, 4, w_init=layer.weight.value["weight"])(jnp.ones(3))) == u.mV


def test_embedding_refuses_numbers() -> None:
    with pytest.raises(TypeError, match="integer"):
        nn.Embedding(5, 4)(jnp.ones(2))


def test_the_rest_is_brainstates_own() -> None:
    from braintrace.nn import BatchNorm0d, Dropout, Flatten, GroupNorm, LayerNorm, MaxPool2d, ReLU, RMSNorm

    for layer in (BatchNorm0d, Dropout, Flatten, GroupNorm, LayerNorm, MaxPool2d, RMSNorm, ReLU):
        assert layer is getattr(brainstate.nn, layer.__name__)
    assert nn.softmax is brainstate.nn.softmax
    assert nn.init is brainstate.nn.init
    assert {"LayerNorm", "GRUCell", "LIF", "surrogate"} <= set(dir(nn))
    assert not {"AllToAll", "ConvTranspose2d"} & set(dir(nn))
    with pytest.raises(AttributeError, match=r"brainstate\.nn\.AllToAll"):
        _ = nn.AllToAll
    with pytest.raises(AttributeError, match="no attribute 'Lienar'"):
        _ = nn.Lienar


def test_all_is_what_is_our_own() -> None:
    assert {"Linear", "GRUCell", "LeakyRateReadout", "STP", "surrogate", "soft_reset"} <= {*nn.__all__}
    assert all(hasattr(nn, name) for name in nn.__all__)
    assert not {"Any", "LayerNorm"} & {*nn.__all__}


def test_no_weights_by_the_back_door() -> None:
    """Of brainstate's layers that we pass on, none multiplies by a weight matrix."""
    for name in set(dir(nn)) & set(brainstate.nn.__all__):
        layer = getattr(brainstate.nn, name)
        if isinstance(layer, type) and issubclass(layer, brainstate.nn.Module) and layer is getattr(nn, name):
            arguments = inspect.signature(layer.__init__).parameters
            assert not {"w_init", "kernel_init", "spar_mat"} & set(arguments), name


def test_layers_can_be_copied_and_pickled() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LIF(4, tau=2.0, reset=nn.hard_reset), nn.Expon(4, tau=3.0))
    brainstate.nn.init_all_states(model)
    x = jnp.asarray(rng.randn(3))
    with brainstate.environ.context(dt=1.0):
        np.testing.assert_array_equal(copy.deepcopy(model)(x), copy.deepcopy(model)(x))
    neuron = nn.ALIF(4, spk_fun=nn.surrogate.multi_gaussian())  # states themselves cannot be, in brainstate
    spike = pickle.loads(pickle.dumps(neuron)).spk_fun
    np.testing.assert_array_equal(jax.vmap(jax.grad(spike))(x), jax.vmap(jax.grad(neuron.spk_fun))(x))
