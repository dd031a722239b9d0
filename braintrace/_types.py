"""Names of types that all rooms share. Write these instead of `Any`, which is for a value of any type at all.

| type | use it for |
|---|---|
| `Array` | `jax.Array`; with a shape where it helps: `Float[Array, "batch state"]` of `jaxtyping` |
| `ArrayLike`, `DTypeLike` | arguments that JAX converts: numbers, NumPy arrays; types by name |
| `PyTree` | parameters, carries, inputs, outputs, gradients: containers of arrays of any structure |
| `Leaves` | the leaves of a pytree in order: arrays; in gradients also None or per-device partial sums |
| `Values` | arrays by stable names: the state of a learning rule, which learners call its traces |
| `Aval` | a shape and a type: of a variable of a jaxpr, or a `jax.ShapeDtypeStruct` |
| `NumPyArray` | `np.ndarray` |
| `Value` | an array or a quantity of `brainunit`, such as a voltage in mV |
| `Key` | a key of `jax.random` |
| `Shape`, `Size` | a shape; a number of units or a shape, as layers take it |
| `Initializer` | `w_init` of a layer: a function of a shape, an array, or None for no weight |
| `Activation` | a function of an array, or its name in `brainstate.nn` |
| `Model` | a model of any framework; only its front end knows more about it |
| `Handle` | an object of a framework that holds a state; only its front end knows more about it |
| `RuleLike` | a learning rule as users give it: its name, its class, or a value of `braintrace.rules` |
| `Function` | a function whose arguments the caller of this package chooses: steps, losses, metrics |
| `Options` | keyword arguments that are passed on, settings, and plain data by name |
| `Option` | the value of a keyword argument that is passed on |
| `Mesh` | a mesh of devices |
| `Path` | the path of a parameter or state in its model |

A jaxpr and its parts have their types in `_compat`: `Jaxpr`, `ClosedJaxpr`, `JaxprEqn`, `Primitive`.
To mypy, `PyTree`, `Aval`, `Value`, `Model`, `Handle`, `RuleLike` and `Option` are `Any`: they tell the reader
what to expect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh as Mesh
from jax.typing import ArrayLike as ArrayLike
from jax.typing import DTypeLike as DTypeLike

Array: TypeAlias = jax.Array
Key: TypeAlias = jax.Array
PyTree: TypeAlias = Any
Leaves: TypeAlias = list[Any]
Values: TypeAlias = dict[str, Array]
Aval: TypeAlias = Any
NumPyArray: TypeAlias = np.ndarray[Any, Any]
Value: TypeAlias = Any
Model: TypeAlias = Any
Handle: TypeAlias = Any
RuleLike: TypeAlias = Any
Shape: TypeAlias = tuple[int, ...]
Size: TypeAlias = int | Sequence[int]
Path: TypeAlias = tuple[str, ...]
Function: TypeAlias = Callable[..., Any]
Initializer: TypeAlias = Callable[..., Any] | ArrayLike | None
Activation: TypeAlias = str | Callable[[Array], Array]
Option: TypeAlias = Any
Options: TypeAlias = dict[str, Any]
