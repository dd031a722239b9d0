"""Count the bytes that the collectives of a compiled program send; loops count as often as they run."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

_KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
_COLLECTIVE = re.compile(rf" = (?P<shape>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b(?:pred|bf16|[suf](\d+)|c(?P<complex>\d+))\w*\[(?P<dims>[\d,]*)\]")
_BEGIN = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TURNS = re.compile(r'known_trip_count[^}]*"n":"(\d+)"')


@dataclass
class Sent:
    """The collectives of a program by kind: the number of runs, and the bytes that a device receives."""

    runs: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, other: Sent, times: int) -> None:
        for mine, more in ((self.runs, other.runs), (self.bytes, other.bytes)):
            mine.update({kind: times * n for kind, n in more.items()})


def bytes_sent(text: str) -> int:
    """Return the bytes that a device receives from collectives, in one run of a compiled program."""
    return sum(collectives(text).bytes.values())


def collectives(text: str) -> Sent:
    """Return the collectives of one run of a compiled program."""
    found: dict[str, Sent] = {}
    called: dict[str, list[tuple[str, int]]] = {"": []}  # and how often
    entry = name = ""
    for line in text.splitlines():
        begun = _BEGIN.match(line)
        if begun:
            name = begun["name"]
            found[name], called[name] = Sent(), []
            entry = name if line.startswith("ENTRY") else entry
            continue
        sends = _COLLECTIVE.search(line)
        if sends:
            shape = sends["shape"]
            if sends["start"] and (sends["kind"] != "all-reduce" or shape.startswith("((")):
                shape = _elements(shape)[1]  # the operands come first
            size = sum(map(_bytes, _ARRAY.finditer(shape)))
            found[name].add(Sent(Counter({sends["kind"]: 1}), Counter({sends["kind"]: size})), 1)
        turns = _TURNS.search(line)
        names = [*_CALLED.findall(line), *re.findall(r"[\w.\-]+", ",".join(_BRANCHES.findall(line)))]
        called[name] += [(other, int(turns[1]) if turns else 1) for other in names]

    @cache
    def total(name: str) -> Sent:
        result = found.get(name, Sent())
        for inner, times in called.get(name, []):
            result.add(total(inner), times)
        return result

    return total(entry)


def _elements(shape: str) -> list[str]:
    """Split a tuple of shapes, which may be tuples, into its elements."""
    found, depth = [""], 0
    for char in shape.strip()[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            found.append("")
        else:
            found[-1] += char
    return found


def _bytes(array: re.Match[str]) -> int:
    bits = int(array[1] or array["complex"] or (16 if array[0].startswith("bf16") else 8))
    return math.prod(int(n) for n in array["dims"].split(",") if n) * bits // 8
