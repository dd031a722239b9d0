"""What stops a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class DivergedError(ArithmeticError):
    """A loss or a gradient that is not finite; the parameters are left as they were before it."""

    def __init__(
        self,
        batch: int,
        epoch: int,
        step: int,
        parameters: list[str],
        loss: float,
        checkpoint: Path | None,
        result: Any,
    ) -> None:
        self.batch, self.epoch, self.step = batch, epoch, step
        self.parameters, self.loss, self.checkpoint, self.result = parameters, loss, checkpoint, result
        if parameters:
            shown = ", ".join(f"`{p}`" for p in parameters[:3])
            more = f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
            what = f"The gradient of {shown}{more} is not finite"
        else:
            what = f"The loss is {loss}"
        saved = f"The last good checkpoint is {checkpoint}" if checkpoint else "There is no checkpoint"
        super().__init__(
            f"{what} at batch {batch} (epoch {epoch}), step {step} of the sequence (loss {loss:g}). "
            f"The parameters are left as they were before that update. {saved}. Try a lower learning rate or "
            "`optax.chain(optax.clip_by_global_norm(1.0), optimizer)`."
        )
