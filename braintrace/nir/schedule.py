"""In which order the nodes of a graph run in a step, if edges form cycles.

Edges carry values within a step. In a cycle one neuron has to run first: what it reads from neurons of the
cycle is their output of the step before. Which one is first depends on edges and names, not on the order of
the nodes, which a file does not keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import NIRError


def schedule(sources: Mapping[str, Sequence[str]], remembers: set[str], foresees: set[str]) -> list[str]:
    """The nodes in the order in which they run.

    Args:
        sources: For each node, the nodes that feed it.
        remembers: Nodes that have an output of the step before.
        foresees: Nodes whose output of a step does not depend on their input of that step.

    Returns:
        Every node once. One without a state comes a second time where it first feeds a cycle with values of
        the step before and later feeds others with those of the step.

    >>> net = {"x": [], "lif": ["x", "loop"], "loop": ["lif"], "y": ["lif"]}
    >>> schedule(net, {"lif"}, set())
    ['x', 'loop', 'lif', 'y']
    """
    order: list[str] = []
    fresh, waiting = set(foresees), dict.fromkeys(_by_distance(sources))
    while waiting:
        ready = [name for name in waiting if fresh.issuperset(sources[name])]
        if not ready:
            first, before = _first_in_cycle(sources, waiting, fresh, remembers)
            order += before
            ready = [first]
        for name in ready:
            order.append(name)
            fresh.add(name)
            del waiting[name]
    used = [_is_used(k, order, sources, remembers | foresees) for k in range(len(order))]
    return [name for name, keep in zip(order, used, strict=True) if keep]


def _by_distance(sources: Mapping[str, Sequence[str]]) -> list[str]:
    """The nodes by the number of edges from the inputs, those of the same number by name."""
    distance: dict[str, int] = {}
    level = [name for name in sources if not sources[name]]
    while level:
        distance |= dict.fromkeys(level, len(set(distance.values())))
        level = [n for n in sources if n not in distance and not distance.keys().isdisjoint(sources[n])]
    return sorted(sources, key=lambda name: (distance.get(name, len(sources)), name))


def _first_in_cycle(
    sources: Mapping[str, Sequence[str]], waiting: Mapping[str, None], fresh: set[str], remembers: set[str]
) -> tuple[str, list[str]]:
    """The neuron that runs first in a cycle that waits for no other, and the nodes that run before it."""
    above = {name: _reach(name, sources, fresh) for name in waiting}
    within = next(name for name in waiting if all(name in above[other] for other in above[name]))
    members = [name for name in waiting if name in above[within]]
    feeding = {name: _reach(name, sources, fresh | remembers) for name in members}
    for name in members:
        if name in feeding[name]:
            raise NIRError(f"`{name}` is in a cycle without a neuron or a delay: {', '.join(members)}.")
    firsts = [name for name in members if name in remembers]
    entered = [n for n in firsts if any(fresh.intersection(sources[m]) for m in (n, *feeding[n]))]
    first = (entered or firsts)[0]
    # the more nodes feed a node, the later it runs
    return first, sorted(feeding[first], key=lambda name: (len(feeding[name]), members.index(name)))


def _reach(name: str, sources: Mapping[str, Sequence[str]], until: set[str]) -> set[str]:
    """The nodes that feed a node, directly or through others; those in `until` are not entered."""
    found: set[str] = set()
    rest = [name]
    while rest:
        for source in sources[rest.pop()]:
            if source not in until and source not in found:
                found.add(source)
                rest.append(source)
    return found


def _is_used(k: int, order: list[str], sources: Mapping[str, Sequence[str]], stateful: set[str]) -> bool:
    """Whether the `k`-th run changes a state, is read before the node's next run, or is the network's end."""
    name, later = order[k], order[k + 1 :]
    until = later[: later.index(name)] if name in later else later
    is_end = not any(name in feeding for feeding in sources.values())
    return name in stateful or is_end or any(name in sources[reader] for reader in until)
