"""Tests run in float64, and no axis or type is added silently."""

import gc

import brainstate  # sets the precision when it is imported, so it comes first
import jax

brainstate.environ.set(precision=64)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 8)  # what names no mesh goes to the first of them
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes many objects that live as long as a test: look for cycles among them less often.
gc.freeze()
gc.set_threshold(20_000, 10, 10)
