"""How a model becomes a `Step`; one framework a file."""

import os as _os
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec

from .. import _precision as _precision  # isort: skip
import brainstate as _brainstate
import brainunit as _brainunit

from .. import _compat
from .modules import add_hidden_perturbation_in_module as add_hidden_perturbation_in_module
from .modules import compile_etrace_graph as compile_etrace_graph
from .modules import extract_module_info as extract_module_info
from .modules import find_hidden_groups_from_module as find_hidden_groups_from_module
from .modules import find_hidden_param_op_relations_from_module as find_hidden_param_op_relations_from_module

# nor those of libraries below
_compat.hide_from_tracebacks(
    _os.path.dirname(_brainstate.__file__),
    _os.path.dirname(_brainunit.__file__),
    _os.path.dirname(str(_import_module(_brainunit.Quantity.__module__.partition(".")[0]).__file__)),
    *(_os.path.dirname(str(s.origin)) for s in map(_find_spec, ("equinox", "diffrax")) if s is not None),
)
