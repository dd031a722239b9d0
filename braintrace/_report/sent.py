"""What a compiled program sends between devices: collectives, each as often as loops run it."""

from __future__ import annotations

import math
import re
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
class _Computation:
    sent: int = 0
    called: list[tuple[str, int]] = field(default_factory=list)  # and how often


def bytes_sent(text: str) -> int:
    """The bytes of what collectives hand to a device, in one run of a compiled program."""
    found: dict[str, _Computation] = {}
    entry, now = "", _Computation()
    for line in text.splitlines():
        begun = _BEGIN.match(line)
        if begun:
            now = found[begun["name"]] = _Computation()
            entry = begun["name"] if line.startswith("ENTRY") else entry
            continue
        sends = _COLLECTIVE.search(line)
        if sends:
            sizes = [_bytes(a) for a in _ARRAY.finditer(sends["shape"])]
            pairs = sends["start"] and sends["kind"] != "all-reduce"  # what goes in is shown as well
            now.sent += max(sizes) if pairs else sum(sizes)
        turns = _TURNS.search(line)
        names = [*_CALLED.findall(line), *re.findall(r"[\w.\-]+", ",".join(_BRANCHES.findall(line)))]
        now.called += [(name, int(turns[1]) if turns else 1) for name in names]

    @cache
    def total(name: str) -> int:
        one = found.get(name, _Computation())
        return one.sent + sum(count * total(inner) for inner, count in one.called)

    return total(entry)


def _bytes(array: re.Match[str]) -> int:
    bits = int(array[1] or array["complex"] or (16 if array[0].startswith("bf16") else 8))
    return math.prod(int(n) for n in array["dims"].split(",") if n) * bits // 8
