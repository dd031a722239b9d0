"""A lock on the folder of a run."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import jax

NAME = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder, which is made if it is new; the first process of a run holds it.

    The operating system releases the lock when the process ends, even if it is killed. File systems without
    locks, and Windows, are not protected.

    Raises:
        BlockingIOError: Another run holds the folder.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    if jax.process_index():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / NAME
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BlockingIOError(
                f"{folder} is in use by another run ({file.read() or 'unknown process'}). Wait until it is "
                "over, or choose another folder."
            ) from None
        except OSError:  # no locks here
            pass
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
