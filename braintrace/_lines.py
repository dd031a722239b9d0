"""The user's own lines, among those of libraries, and warnings that point at them."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
import warnings
import weakref
from types import FrameType
from typing import Any

_PACKAGE = os.path.dirname(__file__) + os.sep
_LIBRARIES = (_PACKAGE, *(sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib", "stdlib")))


def is_users(file: str) -> bool:
    """Whether a file is of no library, and not of Python itself."""
    return not file.startswith((*_LIBRARIES, "<frozen"))


def calling_line(folder: str) -> tuple[str, str]:
    """Of a call into a folder of the package: the outermost function there, and the user's line before it."""
    frame: FrameType | None = sys._getframe(1)
    name = ""
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(os.path.join(_PACKAGE, folder, "")):
            name = frame.f_code.co_name
        frame = frame.f_back
    return name, f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


def raising_line(error: BaseException) -> str:
    """The last line of the user's that an error came through, after it entered the package; or nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, f in enumerate(frames) if f.filename.startswith(_PACKAGE)), len(frames))
    found = [f for f in frames[first:] if is_users(f.filename)]
    return f"{found[-1].filename}:{found[-1].lineno} ({found[-1].name})" if found else ""


# what was said of a model, which is compiled again for each batch size and traced again in each loop
_said: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def warn_user(message: str, category: type[Warning] = UserWarning, *, about: Any = None) -> None:
    """A warning that points at the user's own line, not at a line of a library; once of each model."""
    if about is not None:
        said = _said.setdefault(about, set())
        if message in said:
            return
        said.add(message)
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
