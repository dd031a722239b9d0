"""A lock on the folder of a run, which keeps other runs out."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import jax


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
