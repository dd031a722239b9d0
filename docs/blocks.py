"""The code blocks of a page run when the site is built, and in the tests, one after the other.

A block `python` or `sh` is shown with its output below it; of a block `python markdown` only the output is
shown, as Markdown.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import textwrap
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any
from unittest import mock

import jax

from braintrace._cli import main

FENCE = re.compile(r"^```(python|python markdown|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDTH = 100  # characters of output in a line
ROOT = Path(__file__).parent.parent


def run(text: str, name: str, folder: Path) -> str:
    """Run the blocks of the page `name` in `folder`, and return the page with their outputs."""
    return show(text, outputs(text, name, folder))


def outputs(text: str, name: str, folder: Path) -> list[str]:
    """Run the blocks of a page, which write their files to `folder`, and return the output of each."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    found = []
    for block in FENCE.finditer(text):
        kind, code = block.groups()
        start = text.count("\n", 0, block.start(2))  # an error names the line of the page
        if kind == "sh":
            found.append(_run_commands(code, f"{name}:{start + 1}", folder))
        else:
            found.append(_run_python(compile("\n" * start + code, name, "exec"), scope, folder))
    return found


def show(text: str, found: list[str]) -> str:
    """Return the page with the output of each block below it."""
    remaining = iter(found)

    def with_output(block: re.Match[str]) -> str:
        output = next(remaining)
        if block[1] == "python markdown":
            return output
        output = "\n".join(part for line in output.splitlines() for part in _wrap(line))
        return block[0] + (f"\n\n```{{code-block}} text\n:class: output\n\n{output}\n```" if output else "")

    return FENCE.sub(with_output, text)


def run_all(pages: Mapping[str, str], folder: Path) -> dict[str, list[str]]:
    """Run the blocks of all pages, several pages at a time, each in a process and a folder of its own.

    Outputs are kept: a page runs again only if its code, the package or the installed versions have changed.
    """
    kept = folder / "outputs.json"
    before = json.loads(kept.read_text()) if kept.exists() else {}
    version = _digest_of_sources()
    keys = {
        name: hashlib.sha256(repr((version, FENCE.findall(text))).encode()).hexdigest()
        for name, text in pages.items()
    }
    found = {n: before[n] for n, key in keys.items() if n in before and before[n]["key"] == key}
    # the longest first, so that no core waits for it at the end
    waiting = sorted(keys.keys() - found.keys(), key=lambda n: -before.get(n, {}).get("seconds", 1e3))
    errors: list[str] = []
    jobs = [(name, pages[name], folder / name) for name in waiting]
    # a fork starts with all packages imported; nothing may have been computed before it
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for name, result, seconds in pool.imap_unordered(_run_page, jobs):
            if isinstance(result, str):
                errors.append(result)
            else:
                found[name] = {"key": keys[name], "outputs": result, "seconds": seconds}
                kept.write_text(json.dumps({**before, **found}))
    if errors:
        raise RuntimeError("\n".join(errors))
    return {name: entry["outputs"] for name, entry in found.items()}


def _run_page(job: tuple[str, str, Path]) -> tuple[str, list[str] | str, float]:
    """Return the outputs of a page, or its error, and the seconds of CPU time that it took."""
    name, text, folder = job
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # compiling is most of the time of a page, unless it computes long; costs are shown as users see them
    costly = re.search(r"\b(plan|compare|scan|Stream)\(", text)
    jax.config.update("jax_disable_most_optimizations", costly is None)
    found: list[str] | str
    try:
        found = outputs(text, f"docs/{name}.md", folder)
    except Exception:
        found = traceback.format_exc()
    return name, found, sum(sum(getrusage(who)[:2]) for who in (RUSAGE_SELF, RUSAGE_CHILDREN))


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    places = (ROOT / "braintrace", ROOT / "benchmarks" / "results")
    for path in sorted(p for place in places for p in place.rglob("*.*") if p.suffix != ".pyc"):
        digest.update(path.read_bytes())
    from importlib.metadata import distributions

    digest.update(repr(sorted({(d.name, d.version) for d in distributions()})).encode())
    return digest.hexdigest()


def notebook(text: str, found: list[str]) -> dict[str, Any]:
    """Return a page as a Jupyter notebook, with its outputs."""
    cells: list[dict[str, Any]] = []

    def add_text(part: str) -> None:
        part = re.sub(r"\[([^\]]*)\]\([\w/]+\.md[^)]*\)", r"\1", part)  # links to other pages
        if part.strip():
            cells.append({"cell_type": "markdown", "metadata": {}, "source": part.strip("\n")})

    at = 0
    for number, (block, output) in enumerate(zip(FENCE.finditer(text), found, strict=True), 1):
        add_text(text[at : block.start()])
        code = block[2].rstrip("\n")
        if block[1] == "sh":
            code = "\n".join(f"!{line}" for line in code.splitlines())
        stream = [{"output_type": "stream", "name": "stdout", "text": f"{output}\n"}] if output else []
        cells.append(
            {
                "cell_type": "code",
                "execution_count": number,
                "metadata": {},
                "source": code,
                "outputs": stream,
            }
        )
        at = block.end()
    add_text(text[at:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _wrap(line: str) -> list[str]:
    """Break a line into parts that fit the page; those of a tree continue under its branches."""
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
    return _without_root(printed.getvalue())


def _run_commands(code: str, where: str, folder: Path) -> str:
    """Run the lines of a block: `braintrace` in this process, which has imported it, the others in bash."""
    found = ""
    for line in code.splitlines():
        words = shlex.split(line)
        printed, warned = io.StringIO(), io.StringIO()
        if words[:1] == ["braintrace"]:
            with (
                contextlib.redirect_stdout(printed),
                contextlib.redirect_stderr(warned),
                contextlib.chdir(folder),
            ):
                exit_code = main(words[1:])
            output, errors = printed.getvalue(), warned.getvalue()
        else:
            done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True)
            output, errors, exit_code = done.stdout, done.stderr, done.returncode
        if exit_code:
            raise RuntimeError(f"{where}: exit code {exit_code}\n{output}{errors}")
        found += output
    return _without_root(found)


def _without_root(output: str) -> str:
    """Name files of the package from the root of the repository."""
    return output.replace(f"{ROOT}/", "").strip("\n").rstrip()
