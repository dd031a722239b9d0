"""Checkpoints with Orbax: all that a run needs to continue bit for bit."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeGuard

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from .._lines import warn_user
from .._rules.deferred import is_pending
from .._rules.projection import BASIS
from .._types import Array, Aval, Options, PyTree
from .engine import Engine
from .sharding import Layout

Saved = dict[str, PyTree]  # the leaves of a state, by number
Arrays = dict[str, Saved]  # by the name of the state
Notes = Options  # values of JSON
KEPT = 3  # checkpoints
# the notes that a run cannot continue without
NOTES = {"learner", "epoch", "index", "batch_size", "seconds", "reached"}


class Checkpoints:
    """Checkpoints in one folder, numbered by batches; a checkpoint is written whole or not at all."""

    def __init__(self, folder: str | Path) -> None:
        import orbax.checkpoint as ocp

        self.folder = Path(folder).absolute()
        self._ocp = ocp
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(locked(self.folder))
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, create=True, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        handlers = {"arrays": ocp.PyTreeCheckpointHandler(), "notes": ocp.JsonCheckpointHandler()}
        with _quiet():
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    @property
    def latest(self) -> int | None:
        """The number of the newest checkpoint, which is that of the last batch before it."""
        found: int | None = self._manager.latest_step()
        return found

    def path(self, number: int) -> Path:
        return self.folder / str(number)

    def save(self, number: int, arrays: Arrays, notes: Notes) -> Path:
        """Write arrays by name, and notes as JSON."""
        args = self._ocp.args.Composite(
            arrays=self._ocp.args.PyTreeSave(arrays), notes=self._ocp.args.JsonSave(notes)
        )
        with _quiet():
            self._manager.save(number, args=args, force=True)
            self._manager.wait_until_finished()
        return self.path(number)

    def _load_notes(self, number: int) -> Notes:
        with _quiet():
            args = self._ocp.args.Composite(notes=self._ocp.args.JsonRestore())
            notes: Notes = self._manager.restore(number, args=args)["notes"]
        if missing := NOTES - notes.keys():
            raise KeyError(f"its notes have no {', '.join(sorted(missing))}")
        return notes

    def _load_arrays(self, number: int, like: Arrays) -> Arrays:
        """Read the arrays of a checkpoint; those in `like` get the shardings of these."""
        with _quiet():
            found = self._manager.item_metadata(number)["arrays"]
            tree = {
                name: {i: self._how(saved, like.get(name, {}).get(i)) for i, saved in parts.items()}
                for name, parts in getattr(found, "tree", found).items()
            }
            arrays = self._ocp.args.PyTreeRestore(restore_args=tree)
            loaded = self._manager.restore(number, args=self._ocp.args.Composite(arrays=arrays))
        return loaded["arrays"]  # type: ignore[no-any-return]

    def _how(self, saved: Aval, like: PyTree) -> object:
        """Return how to read an array: sharded as `like` is, else onto one device."""
        if _is_sharded(like) and tuple(saved.shape) == like.shape:
            return self._ocp.ArrayRestoreArgs(sharding=like.sharding)
        if saved.sharding is None:  # it was written from one device
            return self._ocp.RestoreArgs(restore_type=np.ndarray)
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return self._ocp.ArrayRestoreArgs(sharding=here)

    def load_newest(self, arrays_of: Callable[[int, Notes], Arrays]) -> tuple[int, Arrays, Notes]:
        """Read the newest checkpoint that is not damaged: its number, arrays and notes.

        Damaged ones are renamed, with a warning.

        Args:
            arrays_of: `arrays_of(number, notes)` returns the arrays of the run at this point, which give the
                shardings.
        """
        damaged: list[str] = []
        for number in sorted(self._manager.all_steps(), reverse=True):
            try:
                notes = self._load_notes(number)
            except Exception as error:  # Orbax raises many types for a file that is cut or missing
                damaged.append(self._describe(number, error))
                continue
            like = arrays_of(number, notes)
            try:
                arrays = self._load_arrays(number, like)
            except Exception as error:
                damaged.append(self._describe(number, error))
                continue
            if damaged:
                for later in [n for n in self._manager.all_steps() if n > number]:
                    self._set_aside(later)
                warn_user(
                    f"Damaged, and set aside as `damaged-*`: {'; '.join(damaged)}. The run goes on from "
                    f"{self.path(number)}, which was made after batch {number}."
                )
            return number, arrays, notes
        raise ValueError(
            f"No checkpoint in {self.folder} can be read: {'; '.join(damaged)}. Restore them from a copy, or "
            "start afresh with another `checkpoint_dir`."
        )

    def _describe(self, number: int, error: Exception) -> str:
        reason = " ".join(str(error).split())[:200]
        return f"{self.path(number)} ({type(error).__name__}: {reason})"

    def _set_aside(self, number: int) -> None:
        old = self.path(number)
        names = (self.folder / f"damaged-{number}{more}" for more in ("", *map("-{}".format, range(2, 1000))))
        if jax.process_index() == 0:
            old.rename(next(p for p in names if not p.exists()))
        multihost_utils.sync_global_devices(f"damaged {number}")
        with _quiet():
            self._manager.reload()

    def close(self) -> None:
        self._manager.close()
        self._lock.close()


def collect(engine: Engine) -> Arrays:
    """Return the arrays of a checkpoint, by name."""
    found = {name: _saved(state.value) for name, state in _states(engine).items()}
    return {name: arrays for name, arrays in found.items() if arrays}


def restore(engine: Engine, arrays: Arrays, where: Path) -> None:
    """Restore the arrays that `collect` returned."""
    targets = _states(engine)
    if engine.reset:  # a run with another rank chooses its projection again
        shapes = {name: [np.shape(a) for a in jax.tree.leaves(st.value)] for name, st in targets.items()}
        saved = {name: [np.shape(a) for a in found.values()] for name, found in arrays.items()}
        names = (f"state.traces.{BASIS}", "state.traces.balance ")
        other = {n for n in {*shapes, *saved} if n.startswith(names) and shapes.get(n) != saved.get(n)}
        targets = {name: st for name, st in targets.items() if name not in other}
        arrays = {name: found for name, found in arrays.items() if name not in other}
    if unknown := sorted(arrays.keys() - targets.keys()):
        raise ValueError(f"The checkpoint {where} is of another model or run: it has `{unknown[0]}`.")
    restored = lambda name, value: _restored(value, arrays.get(name, {}), name, where, engine.layout)
    new = {name: restored(name, st.value) for name, st in targets.items()}
    for name, state in targets.items():
        state.value = new[name]


def _states(engine: Engine) -> dict[str, brainstate.State]:
    """Return the states of a checkpoint: optimiser, random key, and all states that are not reset."""
    learner = engine.learner
    lasting = learner._lasting_values()
    traces = learner.etrace_states  # up to date, so that no steps are pending
    skipped = {id(st) for k, st in traces.items() if is_pending(k)}
    if engine.reset:
        reset = [st for k, st in traces.items() if k not in lasting]
        skipped |= set(map(id, [*learner.hidden_states.values(), *reset, learner.steps]))
    kept = {path: st for path, st in learner.states().items() if id(st) not in skipped}
    return {
        "optimizer": engine.opt_state,
        "random": brainstate.random.DEFAULT,
        **{"state." + ".".join(map(str, path)): st for path, st in kept.items()},
    }


def _saved(value: PyTree) -> Saved:
    """Return the leaves of a value, with the data of random keys."""
    leaves = jax.tree.leaves(value)
    raw = [jax.random.key_data(a) if _is_key(a) else a for a in leaves]
    # every process writes its shards of sharded arrays
    return {str(i): a if _is_sharded(a) else np.asarray(a) for i, a in enumerate(raw)}


def _restored(value: PyTree, saved: Saved, name: str, where: Path, layout: Layout | None) -> PyTree:
    """Return the saved values with the structure and sharding of `value`."""
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
    if layout is not None:
        new = [layout.as_before(b, a) for a, b in zip(leaves, new, strict=True)]
    return jax.tree.unflatten(tree, new)


def _is_sharded(array: object) -> TypeGuard[Array]:
    return isinstance(array, jax.Array) and len(array.sharding.device_set) > 1


def _is_key(array: PyTree) -> bool:
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, which is created if it is new; the first process of a run holds the lock.

    The operating system releases the lock when the process ends, even if it is killed. File systems without
    locks, and Windows, are not protected.
    """
    if sys.platform == "win32" or jax.process_index():
        yield
        return
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".lock"
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = f"{folder} is in use by another run ({file.read()})."
            raise BlockingIOError(f"{owner} Wait until it is over, or choose another folder.") from None
        except OSError:  # no locks here
            pass
        file.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=file, flush=True)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log lines of Orbax, of which there are many for each checkpoint."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # damaged files are reported by the caller
    try:
        yield
    finally:
        logger.setLevel(level)
