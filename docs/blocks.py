"""The code blocks of a page run when the site is built, and in the tests, one after the other.

A block `python` or `sh` is shown with what it prints below it; of a block `python markdown` only what it
prints is shown, as Markdown.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

FENCE = re.compile(r"^```(python|python markdown|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDTH = 112  # characters of output in a line


def run(text: str, name: str, folder: Path) -> str:
    """The page `name` with the outputs of its blocks, which write their files to `folder`."""
    scope: dict[str, Any] = {"__name__": "__main__"}

    def with_output(block: re.Match[str]) -> str:
        kind, code = block.groups()
        start = text.count("\n", 0, block.start(2))  # an error names the line of the page
        if kind == "sh":
            output = _run_commands(code, f"{name}:{start + 1}", folder)
        else:
            output = _run_python(compile("\n" * start + code, name, "exec"), scope, folder)
        if kind == "python markdown":
            return output
        output = "\n".join(part for line in output.splitlines() for part in _wrap(line))
        return block[0] + (f"\n\n```{{code-block}} text\n:class: output\n\n{output}\n```" if output else "")

    return FENCE.sub(with_output, text)


def _wrap(line: str) -> list[str]:
    """A line in parts that fit the page; those of a tree go on under its branches."""
    lead = re.match(r"[ │├└─]*", line)[0]  # type: ignore[index]
    below = lead.replace("├", "│").replace("└", " ").replace("─", " ") + "  "
    return textwrap.wrap(line, WIDTH, subsequent_indent=below, break_on_hyphens=False) or [""]


def _run_python(code: Any, scope: dict[str, Any], folder: Path) -> str:
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.chdir(folder),
        mock.patch("braintrace._report.report._WIDE", WIDTH),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"Warning: {message}")
        exec(code, scope)
    return printed.getvalue().strip("\n").rstrip()


def _run_commands(code: str, where: str, folder: Path) -> str:
    command = f'braintrace() {{ {shlex.quote(sys.executable)} -m braintrace "$@"; }}\n{code}'
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(["bash", "-ec", command], cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{where}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.rstrip()
