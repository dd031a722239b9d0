"""The rooms of the package: imports point downwards, and the core knows no framework."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "braintrace"
CORE = [
    "_compat",
    "_meshes",
    "_lines",
    "_ops",
    "_compiler",
    "_executor",
    "_rules",
    "_online",
]  # from the ground up
FRAMEWORKS = {"brainstate", "flax", "equinox", "haiku"}
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}


def imports(file: str, *, at_once: bool) -> Iterator[str]:
    """What a file imports, with a dot before what is of this package.

    With `at_once`, without what is imported inside of functions, or for type checkers only.
    """

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            if not at_once or not (for_types or isinstance(child, ast.FunctionDef)):
                yield child
                yield from walk(child)

    package = file.split(".")[:-1]
    for node in walk(ast.parse(FILES[file].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            name = ".".join(filter(None, base))
            inner = [".".join(filter(None, [name, alias.name])) for alias in node.names]
            yield from (f".{n if n in FILES or f'{n}.__init__' in FILES else name}" for n in inner)


@pytest.mark.parametrize("room", CORE)
def test_the_core_imports_downwards(room):
    below = set(CORE[: CORE.index(room) + 1])
    for file in (f for f in FILES if f.split(".")[0] == room):
        for name in imports(file, at_once=False):
            assert name.split(".")[0] not in FRAMEWORKS, f"{file} imports {name}"
        for name in imports(file, at_once=True):
            assert not name.startswith(".") or name.split(".")[1] in below, f"{file} imports {name}"
        later = {name.split(".")[1] for name in imports(file, at_once=False) if name.startswith(".")}
        assert later <= below | {"_report", "_diagnostics"}, f"{file} imports {later - below}"


def test_no_two_files_need_each_other():
    needs = {file: [n[1:] for n in imports(file, at_once=True) if n[0] == "."] for file in FILES}
    done: set[str] = set()

    def visit(file: str, path: tuple[str, ...]) -> None:
        assert file not in path, " -> ".join((*path, file))
        if file not in done:
            for name in needs[file]:
                if name in FILES:
                    visit(name, (*path, file))
            done.add(file)

    for file in FILES:
        visit(file, ())
