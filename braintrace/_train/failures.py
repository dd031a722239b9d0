"""Errors that end a training run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from .checkpoint import Checkpoints
    from .result import FitResult


class DivergedError(ArithmeticError):
    """A loss or a gradient is not finite; the parameters are left as they were before it."""

    def __init__(
        self,
        batch: int,
        epoch: int,
        step: int,
        parameters: list[str],
        loss: float,
        result: FitResult,
        cause: str = "",
    ) -> None:
        self.batch, self.epoch, self.step, self.parameters = batch, epoch, step, parameters
        self.loss, self.result, self.checkpoint = loss, result, result.checkpoint
        if parameters:
            shown = ", ".join(f"`{p}`" for p in parameters[:3])
            more = f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
            what = f"The gradient of {shown}{more} is not finite"
        else:
            what = f"The loss is {loss}"
        saved = "There is no checkpoint"
        if self.checkpoint is not None:
            saved = f"The last good checkpoint is {self.checkpoint}"
        advice = "Try a lower learning rate or `optax.chain(optax.clip_by_global_norm(1.0), optimizer)`."
        super().__init__(
            f"{what} at batch {batch} (epoch {epoch}), step {step} of the sequence (loss {loss:g}). "
            f"The parameters are left as they were before that update. {saved}. {cause or advice}"
        )


class LostProcessError(RuntimeError):
    """Another process of the run is gone. Continue with `resume=True` on the remaining devices.

    JAX may end a process that waits for a lost one before this error can be raised.
    """


# messages of gloo, NCCL and JAX's coordination service when a process does not answer
_LOST = re.compile(r"gloo|nccl|heartbeat|connection|coordination service|unavailable|deadline", re.IGNORECASE)


@contextlib.contextmanager
def naming_lost_process(processes: int, checkpoints: Checkpoints | None) -> Iterator[None]:
    """Turn an error of communication into a `LostProcessError`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if processes == 1 or not _LOST.search(str(error)):
            raise
        saved = None if checkpoints is None else checkpoints.latest
        where = "There is no checkpoint"
        if checkpoints is not None and saved is not None:
            where = f"The newest checkpoint is {checkpoints.path(saved)}"
        raise LostProcessError(
            f"Another of the {processes} processes of this run is gone ({str(error).splitlines()[0]}). "
            f"{where}. Start all of them again with `resume=True` (`--resume`), on as many devices as are "
            "left."
        ) from error
