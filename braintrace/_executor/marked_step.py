"""The step with a mark at every use of a parameter, from which per-sample weight gradients are derived.

The compiled model may lack a mark at a use without a trace (a plain encoder in front of the cell), or have
one on a weight before it is combined with samples (a leak that all samples share).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from .._compiler.module_info import ModuleInfo
from .._compiler.program import Site
from .effective_weights import Weighted
from .executor import ETraceGraphExecutor
from .weight_gradients import find_weighted
from .window import Window


class MarkedStep:
    """The fully marked step of a compiled model, and the maps of constants and sites between the two."""

    def __init__(self, executor: ETraceGraphExecutor) -> None:
        self.traced = executor
        info = executor.info
        marked = info.marked
        self._consts = _same_consts(info, marked)
        self._sites = _same_sites(info, marked)
        if self._consts is None or self._sites is None:
            marked, self._consts, self._sites = info, None, None
        self.info = marked
        graph = executor.graph._replace(module_info=marked)
        self.executor = executor if marked is info else ETraceGraphExecutor(graph)

    @cached_property
    def weighted(self) -> list[Weighted]:
        """The sites whose weight gradients follow from their axis labels."""
        if self.executor is self.traced:
            return self.traced.weighted
        assert self._sites is not None
        traced = [self._sites.get(r.site.index) for r in self.traced.graph.hidden_param_op_relations]
        return find_weighted(self.info, [s for s in traced if s is not None])

    def tell_read(self) -> None:
        """Record in the compiled model which of its constants analyses of the marked step have used."""
        if self._consts is None:
            return
        own, program = list(self.traced.info.program.consts), self.info.program
        for var, at in zip(program.consts, self._consts, strict=True):
            if any(var is atom for atom in program.read):
                self.traced.info.program.read.append(own[at])

    def site(self, site: Site) -> Site | None:
        """The site of the marked step for a site of the compiled model."""
        return site if self._sites is None else self._sites.get(site.index)

    def window(self, window: Window) -> Window:
        """The window of the marked step for a window of the compiled model, or for itself."""
        if window.executor is self.executor:
            return window
        assert self._consts is not None
        assert self._sites is not None
        consts, fixed = (
            [given[c] for c in self._consts] if given else [] for given in (window.consts, window.fixed)
        )
        ys = {self._sites[i].index: y for i, y in window.ys.items() if i in self._sites}
        inputs = {self._sites[i].index: x for i, x in window.inputs.items() if i in self._sites}
        return replace(window, executor=self.executor, consts=consts, ys=ys, inputs=inputs, fixed=fixed)


def _same_consts(info: ModuleInfo, marked: ModuleInfo) -> list[int] | None:
    """The index of each constant of the marked step among those of the model; None if not unique."""
    known = list(info.program.consts.values())
    found: list[int] = []
    for value in marked.program.consts.values():
        at = [i for i, c in enumerate(known) if c is value]
        if len(at) != 1:
            return None
        found += at
    return found


def _same_sites(info: ModuleInfo, marked: ModuleInfo) -> dict[int, Site] | None:
    """The site of the marked step for each site of the model that takes data; None if they differ."""
    before = [s for s in info.program.sites if s.num_inputs]
    after = [s for s in marked.program.sites if s.num_inputs and not (s.found and not info.step.found)]
    if [s.primitive for s in before] != [s.primitive for s in after]:
        return None
    return {a.index: b for a, b in zip(before, after, strict=True)}
