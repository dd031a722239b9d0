"""The user's own lines, among those of libraries, and warnings that point at them."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
import warnings
import weakref
from types import FrameType

_PACKAGE = os.path.dirname(__file__) + os.sep
_LIBRARIES = (_PACKAGE, *(sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib", "stdlib")))


def is_users(file: str) -> bool:
    """Whether a file belongs neither to a library nor to Python itself."""
    return not file.startswith((*_LIBRARIES, "<frozen"))


def calling_line(folder: str) -> tuple[str, str]:
    """The outermost function of a folder of the package on the stack, and the user's line that calls it."""
    frame: FrameType | None = sys._getframe(1)
    name = ""
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(os.path.join(_PACKAGE, folder, "")):
            name = frame.f_code.co_name
        frame = frame.f_back
    return name, f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


def raising_line(error: BaseException) -> str:
    """The last line of user code that an error came through inside the package; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, f in enumerate(frames) if f.filename.startswith(_PACKAGE)), len(frames))
    found = [f for f in frames[first:] if is_users(f.filename)]
    return f"{found[-1].filename}:{found[-1].lineno} ({found[-1].name})" if found else ""


# the warnings about a model, which is compiled again for each batch size and traced again in each loop
_given: weakref.WeakKeyDictionary[object, set[str]] = weakref.WeakKeyDictionary()


def warn_user(message: str, category: type[Warning] = UserWarning, *, about: object = None) -> None:
    """Warn at the user's own line, not at a line of a library; once for each model (`about`)."""
    if about is not None:
        given = _given.setdefault(about, set())
        if message in given:
            return
        given.add(message)
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
