"""Checkpoints with orbax: everything a run needs to go on as if it had never stopped."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._lines import warn_user
from .engine import Engine

# what a run writes beside its arrays, and cannot go on without
NOTES = {"learner", "epoch", "index", "batch_size", "seconds", "reached"}


class Checkpoints:
    """Numbered checkpoints in one folder, of which the last few are kept; written whole or not at all."""

    def __init__(self, folder: str | Path, keep: int) -> None:
        import orbax.checkpoint as ocp

        self.folder = Path(folder).absolute()
        self._ocp = ocp
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        with _quiet():
            self._manager = ocp.CheckpointManager(self.folder, options=options)

    @property
    def latest(self) -> int | None:
        """The number of the newest one: of the batch after which it was made."""
        found: int | None = self._manager.latest_step()
        return found

    def path(self, number: int) -> Path:
        return self.folder / str(number)

    def save(self, number: int, arrays: dict[str, Any], notes: dict[str, Any]) -> Path:
        """Write arrays by name, and notes of any JSON kind."""
        args = self._ocp.args.Composite(
            arrays=self._ocp.args.PyTreeSave(arrays), notes=self._ocp.args.JsonSave(notes)
        )
        with _quiet():
            self._manager.save(number, args=args, force=True)
            self._manager.wait_until_finished()
        return self.path(number)

    def load(self, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arrays and the notes of a checkpoint."""
        with _quiet():
            found = self._manager.item_metadata(number)["arrays"]
            tree = getattr(found, "tree", found)
            as_numpy = jax.tree.map(lambda _: self._ocp.RestoreArgs(restore_type=np.ndarray), tree)
            args = self._ocp.args.Composite(
                arrays=self._ocp.args.PyTreeRestore(restore_args=as_numpy), notes=self._ocp.args.JsonRestore()
            )
            loaded = self._manager.restore(number, args=args)
        return loaded["arrays"], loaded["notes"]

    def load_newest(self) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """The newest one that can be read: its number, arrays and notes.

        One that is damaged is said and set aside, so that another can be written in its place.
        """
        damaged: list[str] = []
        for number in sorted(self._manager.all_steps(), reverse=True):
            try:
                arrays, notes = self.load(number)
                missing = NOTES - notes.keys()
                if missing:
                    raise KeyError(f"its notes have no {', '.join(sorted(missing))}")
            except Exception as error:  # whatever orbax makes of a file that is cut, or not there
                reason = " ".join(str(error).split())[:200]
                damaged.append(f"{self.path(number)} ({type(error).__name__}: {reason})")
                continue
            if damaged:
                for later in [n for n in self._manager.all_steps() if n > number]:
                    self._set_aside(later)
                warn_user(
                    f"Damaged, and set aside as `damaged-*` beside it: {'; '.join(damaged)}. The run goes on "
                    f"from {self.path(number)}, which was made after batch {number}."
                )
            return number, arrays, notes
        raise ValueError(
            f"No checkpoint in {self.folder} can be read: {'; '.join(damaged)}. Bring them back from a copy, "
            "or start afresh with another `checkpoint_dir`."
        )

    def _set_aside(self, number: int) -> None:
        old = self.path(number)
        names = (self.folder / f"damaged-{number}{more}" for more in ("", *map("-{}".format, range(2, 1000))))
        old.rename(next(p for p in names if not p.exists()))
        with _quiet():
            self._manager.reload()

    def close(self) -> None:
        self._manager.close()


def collect(engine: Engine) -> dict[str, Any]:
    """Every array that training continues from, by name."""
    found = {name: _saved(state.value) for name, state in _states(engine).items()}
    return {name: arrays for name, arrays in found.items() if arrays}


def restore(engine: Engine, arrays: dict[str, Any], where: Path) -> None:
    """Put back what `collect` collected."""
    targets = _states(engine)
    if unknown := sorted(arrays.keys() - targets.keys()):
        raise ValueError(
            f"The checkpoint {where} is of another model or run: it has `{unknown[0]}`, this one has not."
        )
    new = {name: _restored(st.value, arrays.get(name, {}), name, where) for name, st in targets.items()}
    for name, state in targets.items():
        state.value = new[name]


def _states(engine: Engine) -> dict[str, brainstate.State]:
    """The optimiser, the random key, the parameters, and what else is not reset before each sequence."""
    learner = engine.learner
    hidden = [*learner.hidden_states.values(), *learner.traces.values(), learner.steps]
    skipped = {id(st) for st in hidden} if engine.reset else set()
    kept = {path: st for path, st in learner.states().items() if id(st) not in skipped}
    return {
        "optimizer": engine.opt_state,
        "random": brainstate.random.DEFAULT,
        **{"state." + ".".join(map(str, path)): st for path, st in kept.items()},
    }


def _saved(value: Any) -> dict[str, Any]:
    """The leaves of a value; a random key as its numbers."""
    leaves = jax.tree.leaves(value)
    raw = [jax.random.key_data(a) if _is_key(a) else a for a in leaves]
    return {str(i): np.asarray(a) for i, a in enumerate(raw)}


def _restored(value: Any, saved: Any, name: str, where: Path) -> Any:
    leaves, tree = jax.tree.flatten(value)
    found = [saved[str(i)] for i in range(len(saved))]
    shapes = [np.shape(_saved([a])["0"]) for a in leaves]
    if shapes != [a.shape for a in found]:
        raise ValueError(
            f"The checkpoint {where} does not fit the model: `{name}` has shapes {[a.shape for a in found]} "
            f"there and {shapes} here."
        )
    new = [
        jax.random.wrap_key_data(b, impl=jax.random.key_impl(a)) if _is_key(a) else jnp.asarray(b, a.dtype)
        for a, b in zip(leaves, found, strict=True)
    ]
    return jax.tree.unflatten(tree, new)


def _is_key(array: Any) -> bool:
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the log lines of orbax, of which there are many for each checkpoint."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # a damaged file is told by whoever reads it
    try:
        yield
    finally:
        logger.setLevel(level)
