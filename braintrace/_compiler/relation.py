"""A relation: a site, its parameters, and the hidden groups and positions that it feeds."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .._compat import ClosedJaxpr, Primitive
from .._ops.axis_labels import Labels, Layout
from .._ops.primitive import ETPPrimitive
from .._types import Array, Handle, NumPyArray, Options
from .groups import HiddenGroup
from .module_info import ModuleInfo
from .program import Atom, Site, Var
from .reach import Reach
from .slices import Slice, between, cut_after
from .step import Path, show_path


class PathClassification(enum.StrEnum):
    """How the output of a site reaches a hidden state within the step."""

    ALL_DIRECT = "all_direct"
    ALL_THROUGH_OTHER_ETP = "all_through_other_etp"
    MIXED = "mixed"


@dataclass(frozen=True, eq=False)
class PositionMap:
    """The map between positions of a site's output `y` and hidden positions.

    If a trace is indexed by positions of `y`, `map[y position]` is the hidden position that it reaches. If
    `on_hidden` (a broadcast), `map[hidden position]` is its position of `y`. -1 means none. `complete` is
    false if the trace leaves out paths to other positions.
    """

    on_hidden: bool
    map: NumPyArray
    complete: bool
    reach: Reach = field(repr=False)
    source_width: int | None = None


@dataclass(frozen=True, eq=False)
class HiddenParamOpRelation:
    """One site, the parameters of its weights and the hidden groups that it feeds."""

    site: Site
    info: ModuleInfo
    hidden_groups: list[HiddenGroup]
    position_maps: list[PositionMap]
    path_classification: dict[Path, PathClassification]
    trainable_paths: dict[str, Path]
    trainable_leaf_indices: dict[str, int]
    trainable_leaves: dict[str, tuple[tuple[Path, int], ...]]  # all leaves that a weight depends on
    varying: tuple[str, ...] = ()
    # axis labels along which a trace is uniform, by weight and group, if the rule stores it without them
    uniform: Mapping[tuple[str, int], Labels] = field(default_factory=dict)
    # start and stop of the last axis of a weight that a trace covers, by weight and group, if not all of it
    columns: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def __repr__(self) -> str:
        names = [
            ", ".join(map(show_path, paths)) for paths in (self.param_paths, self.connected_hidden_paths)
        ]
        return f"<HiddenParamOpRelation: {self.primitive} of {names[0]} feeds {names[1]}>"

    @property
    def primitive(self) -> ETPPrimitive:
        return self.site.primitive

    @property
    def eqn_params(self) -> Options:
        return self.site.params

    @property
    def x_var(self) -> Atom | None:
        return self.site.inputs[0] if self.site.num_inputs else None

    @property
    def y_var(self) -> Var:
        return self.site.output

    x, y = x_var, y_var

    @property
    def trainable_vars(self) -> dict[str, Atom]:
        return self.site.weights

    @property
    def trainable_param_states(self) -> dict[str, Handle]:
        states = {e.path: e.state for e in self.info.params}
        return {name: states[path] for name, path in self.trainable_paths.items()}

    @cached_property
    def trainable_processing_chains(self) -> dict[str, tuple[Primitive, ...]]:
        """The primitives between each weight of the op and its parameter."""
        result = {}
        for name, leaves in self.trainable_leaves.items():
            inputs = [v for v, leaf in self.info.invar_to_leaf.items() if leaf in leaves]
            inside = bool(self.site.context)
            nodes = [] if inside else between(self.info.program, inputs, [self.site.weights[name]])
            result[name] = tuple(n.primitive for n in nodes)
        return result

    @property
    def param_paths(self) -> list[Path]:
        """Every parameter that the weights depend on."""
        return list(dict.fromkeys(p for leaves in self.trainable_leaves.values() for p, _ in leaves))

    @property
    def weight_path(self) -> Path:
        return next(iter(self.trainable_paths.values()))

    path = weight_path

    @property
    def connected_hidden_paths(self) -> list[Path]:
        return [p for p, c in self.path_classification.items() if c != "all_through_other_etp"]

    @property
    def feeds(self) -> list[tuple[HiddenGroup, PositionMap]]:
        """The groups that the site feeds, each with its position map."""
        return list(zip(self.hidden_groups, self.position_maps, strict=True))

    @property
    def complete(self) -> bool:
        """Whether the traces cover every path from the site to its groups within the step."""
        return all(m.complete for m in self.position_maps)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        return self.site.layouts(self.varying, self.trainable_paths)

    @cached_property
    def _slices(self) -> list[Slice]:
        return [cut_after(self.info.program, self.site, g.hidden_outvars) for g in self.hidden_groups]

    @property
    def y_to_hidden_group_jaxprs(self) -> list[ClosedJaxpr]:
        """For each group, `(y, constants) -> new states`, along paths without another marked op."""
        return [s.jaxpr for s in self._slices]

    @property
    def y_to_hidden_group_constvars(self) -> list[list[Var]]:
        """The variables that each of `y_to_hidden_group_jaxprs` takes after `y`."""
        return [s.constvars for s in self._slices]

    def y_to_hidden_groups(
        self, y: Array, consts: Sequence[Sequence[Array]], concat_hidden_vals: bool = True
    ) -> list[Array] | list[list[Array]]:
        """The new states of each group, given `y` and the constants of each slice."""
        values = [s.call([y], c) for s, c in zip(self._slices, consts, strict=True)]
        if not concat_hidden_vals:
            return values
        return [g.concat_hidden(v) for g, v in zip(self.hidden_groups, values, strict=True)]

    def dict(self) -> Options:
        names = (
            "primitive x_var y_var hidden_groups y_to_hidden_group_jaxprs connected_hidden_paths eqn_params "
            "path_classification trainable_vars trainable_paths trainable_leaf_indices "
            "trainable_param_states trainable_processing_chains"
        )
        return {name: getattr(self, name) for name in names.split()}
