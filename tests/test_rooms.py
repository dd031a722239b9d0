"""The rooms of the package: imports point downwards, and the core knows no framework."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "braintrace"
# from the ground up; `braintrace/__init__.py` re-exports all of them
CORE = "_types _compat _lines _meshes _precision _ops _compiler _executor _rules _online".split()
SHELLS = """rules _diagnostics _report nn _frontends _train _learners tasks agents nir nnx _legacy
_loading _cli __main__ __init__""".split()
ROOMS = [*CORE, *SHELLS]
FRAMEWORKS = {"brainstate", "brainunit", "flax", "equinox", "haiku"}

# What still breaks these rules: the list may only become shorter.
UNITS_IN_THE_CORE = {"_online.request", "_ops.dense", "_ops.primitive"}
HIDDEN_CYCLES = [
    {"_compiler.exactness", "_compiler.graph", "_compiler.leaky_readouts"},
    {"_executor.executor", "_executor.own_diagonal", "_executor.trace_recursion"},
    {"_rules.chunk", "_rules.rule"},
    {"_train.curves", "_train.result"},
    {"_train.comparison", "_train.comparison_picture"},
    {"_cli.completion", "_cli.main"},
]

FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}


def imports(file: str, *, lazy: bool) -> Iterator[str]:
    """What a file imports when it runs, with a dot before what is of this package.

    With `lazy`, also what is imported inside of functions; never what is imported for type checkers only.
    """

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            if not for_types and (lazy or not isinstance(child, ast.FunctionDef)):
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


def room_of(file: str) -> str:
    return file.split(".")[0]


def test_every_room_has_its_place():
    assert {room_of(file) for file in FILES} <= set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_downwards(room):
    """Also those inside of functions, which would hide a cycle; only what type checkers read may point up."""
    below = set(ROOMS[: ROOMS.index(room) + 1])
    for file in (f for f in FILES if room_of(f) == room):
        used = {room_of(name[1:]) for name in imports(file, lazy=True) if name.startswith(".")}
        assert used <= below, f"{file} imports {used - below}"


@pytest.mark.parametrize("room", CORE)
def test_the_core_knows_no_framework(room):
    exceptions = {"_precision": {"brainstate"}}.get(room, set())
    for file in (f for f in FILES if room_of(f) == room):
        used = FRAMEWORKS & {room_of(name) for name in imports(file, lazy=True)}
        units = {"brainunit"} if file in UNITS_IN_THE_CORE else set()
        assert used <= exceptions | units, f"{file} imports {used}"


def test_no_two_files_need_each_other():
    needs = {file: [n[1:] for n in imports(file, lazy=False) if n[0] == "."] for file in FILES}
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


def test_imports_inside_functions_hide_no_cycle():
    needs = {file: {n[1:] for n in imports(file, lazy=True) if n[0] == "."} & FILES.keys() for file in FILES}

    def reached(file: str) -> set[str]:
        found, waiting = set(), list(needs[file])
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += needs[name]
        return found

    behind = {file: reached(file) for file in FILES}
    for file in FILES:
        cycle = {other for other in behind[file] if file in behind[other]}
        assert not cycle or any(cycle <= known for known in HIDDEN_CYCLES), cycle
