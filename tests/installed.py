"""Check an installed package: `python tests/installed.py`, outside of the repository."""

import sys
from importlib.metadata import requires, version
from importlib.resources import files
from pathlib import Path


def check() -> None:
    """Import, train a step, and look for the files that a wheel has to contain."""
    import brainstate
    import jax
    import jax.numpy as jnp

    import braintrace

    place = Path(braintrace.__file__).parent
    assert Path(__file__).parent.parent not in place.parents or ".venv" in str(place), (
        f"not installed: {place}"
    )
    assert braintrace.__version__ == version("braintrace")
    assert any("jax" in line for line in requires("braintrace") or ())
    for name in ("py.typed", "_train/report_page.html", "_report/pictures/page.html"):
        assert files("braintrace").joinpath(name).is_file(), f"no {name}"

    cell = braintrace.nn.GRUCell(3, 8)
    learner = braintrace.compile(cell, "d_rtrl", jnp.ones((2, 3)), batch_size=2, seed=0)
    params = cell.states(brainstate.ParamState)
    loss = lambda x: jnp.mean(learner(x) ** 2)
    before = float(loss(jnp.ones((2, 3))))
    for _ in range(5):
        grads = brainstate.transform.grad(loss, params)(jnp.ones((2, 3)))
        for path, state in params.items():
            state.value = jax.tree.map(lambda w, g: w - 0.1 * g, state.value, grads[path])
    assert 0 < float(loss(jnp.ones((2, 3)))) != before
    print(f"braintrace {version('braintrace')} in {place}: imports, trains, has its files")


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    check()
