"""Published rules beside those of the PyPI braintrace 0.2.6, where both compute the same definition.

    python benchmarks/published.py path/to/the/python/of/an/environment/with/0.2.6

Each environment runs this file and prints its gradients; here they are compared, parameter by parameter.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from typing import Any

# by name: the class, its options here, and its options in 0.2.6 (None: the same)
RULES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "D_RTRL": ("D_RTRL", {}, None),
    "EProp": ("EProp", {}, None),
    "EProp, filter 0.7": ("EProp", {"kappa_filter_decay": 0.7}, None),
    "OSTLRecurrent": ("OSTLRecurrent", {}, None),
    "OSTLFeedforward, 0.2.6's decay": ("OSTLFeedforward", {"decay_or_rank": 1e-6}, {}),
    "OSTLFeedforward (0.2.6 keeps nothing)": ("OSTLFeedforward", {}, None),
    "ThreeFactor": ("ThreeFactor", {"modulator": 0.5}, None),
    "config: leak": ("config", {"temporal_recursion": "scalar_leak", "decay": 0.8}, None),
    "config: none": ("config", {"temporal_recursion": "none"}, None),
    "config: coupled": ("config", {"recurrence_scope": "coupled"}, None),
    "config: filter": ("config", {"trace_filter": "kappa", "kappa": 0.6}, None),
    "config: averages": ("config", {"trace_factorization": "io_factorized", "decay": [0.9, 0.8]}, None),
    "config: averages, leak": (
        "config",
        {
            "trace_factorization": "io_factorized",
            "temporal_recursion": ["scalar_leak", "scalar_leak"],
            "decay": [0.9, 0.8],
        },
        None,
    ),
}
STEPS, BATCH, INPUTS, UNITS, OUTPUTS = 6, 2, 3, 5, 2


def gradients(theirs: bool) -> dict[str, Any]:
    """Of each rule, the gradients of all steps, by parameter; or why there are none."""
    import brainstate
    import jax
    import jax.numpy as jnp
    import numpy as np

    import braintrace

    jax.config.update("jax_enable_x64", True)

    class Net(brainstate.nn.Module):
        """Leaky units with recurrent weights, and a readout of the states as they are."""

        def __init__(self) -> None:
            super().__init__()
            draw = np.random.RandomState(0).randn
            self.w = brainstate.ParamState(jnp.asarray(draw(INPUTS, UNITS)))
            self.r = brainstate.ParamState(jnp.asarray(0.5 * draw(UNITS, UNITS)))
            self.o = brainstate.ParamState(jnp.asarray(draw(UNITS, OUTPUTS)))

        def init_state(self, batch_size: int | None = None, **_: Any) -> None:
            self.h = brainstate.HiddenState(jnp.zeros((BATCH, UNITS)))

        def update(self, x: Any) -> Any:
            y = braintrace.matmul(x, self.w.value) + braintrace.matmul(self.h.value, self.r.value)
            self.h.value = 0.8 * self.h.value + jnp.tanh(y)
            return self.h.value @ self.o.value

    xs = jnp.asarray(np.random.RandomState(1).randn(STEPS, BATCH, INPUTS))
    found: dict[str, Any] = {}
    for name, (cls, options, others) in RULES.items():
        options = others if theirs and others is not None else options
        model = Net()
        brainstate.nn.init_all_states(model, batch_size=BATCH)
        try:
            if cls == "config":
                given = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
                learner = braintrace.compile(model, braintrace.ETraceConfig(**given), xs[0])
            else:
                learner = braintrace.compile(model, getattr(braintrace, cls), xs[0], **options)
            grads = learner.etrace_grad(
                xs, step_fn=lambda x, net=learner: jnp.sum(net(x) ** 2), reduction="sum"
            )
            found[name] = {".".join(map(str, k)): np.asarray(v).tolist() for k, v in grads.items()}
        except Exception as e:  # whatever the other package raises is what there is to say of it
            found[name] = f"{type(e).__name__}: {e}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", nargs="?", help="the Python of an environment with 0.2.6")
    parser.add_argument("--print", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.print:
        print(json.dumps(gradients(args.print == "theirs")))
        return
    import numpy as np

    mine = gradients(theirs=False)
    # a folder of this repository on the path would hide the package under test
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [*shlex.split(args.python or sys.executable), __file__, "--print", "theirs"]
    out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    yours = json.loads(out.splitlines()[-1])
    for name, a in mine.items():
        b = yours[name]
        if isinstance(a, str) or isinstance(b, str):
            here, there = (v if isinstance(v, str) else "it runs" for v in (a, b))
            print(f"{name}: here {here}; there {there}")
            continue
        each = []
        for k, v in a.items():
            x, y = np.asarray(v), np.asarray(b[k])
            scale = max(float(np.abs(x).max()), float(np.abs(y).max()), 1e-30)
            each.append(f"{k} {float(np.abs(x - y).max()) / scale:.1e}")
        print(f"{name}: {', '.join(each)}")


if __name__ == "__main__":
    main()
