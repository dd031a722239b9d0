"""Keep the precision that the user chose: `import brainstate` switches `jax_enable_x64` off."""

import os
import sys

import jax.numpy as jnp


def keep_x64() -> None:
    """Import `brainstate` and, if the user had switched 64-bit types on, switch them on again, for both."""
    was_on = jnp.result_type(float) == jnp.float64
    if "brainstate" in sys.modules:  # it has switched them off already: only the environment is left to ask
        was_on |= os.environ.get("JAX_ENABLE_X64", "").lower() in ("1", "true", "yes", "on", "y", "t")
    import brainstate

    if was_on:
        brainstate.environ.set(precision=64)


keep_x64()
