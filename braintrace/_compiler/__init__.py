"""A model's step -> its trace graph: sites, hidden groups, relations and diagnostics."""

import os as _os
from importlib import import_module as _import_module

import brainstate as _brainstate
import brainunit as _brainunit

from .. import _compat
from .diagnostics import CompilationRecord as CompilationRecord
from .diagnostics import DiagnosticKind as DiagnosticKind
from .diagnostics import DiagnosticLevel as DiagnosticLevel
from .errors import CompilationError as CompilationError
from .errors import NotSupportedError as NotSupportedError
from .exactness import DroppedPath as DroppedPath
from .exactness import Exactness as Exactness
from .exactness import RuleKind as RuleKind
from .graph import ETraceGraph as ETraceGraph
from .graph import add_hidden_perturbation_from_minfo as add_hidden_perturbation_from_minfo
from .graph import add_hidden_perturbation_in_module as add_hidden_perturbation_in_module
from .graph import compile_etrace_graph as compile_etrace_graph
from .graph import find_hidden_groups_from_minfo as find_hidden_groups_from_minfo
from .graph import find_hidden_groups_from_module as find_hidden_groups_from_module
from .graph import find_hidden_param_op_relations_from_minfo as find_hidden_param_op_relations_from_minfo
from .graph import find_hidden_param_op_relations_from_module as find_hidden_param_op_relations_from_module
from .groups import HiddenGroup as HiddenGroup
from .module_info import ModuleInfo as ModuleInfo
from .module_info import extract_module_info as extract_module_info
from .perturbation import HiddenPerturbation as HiddenPerturbation
from .relation import HiddenParamOpRelation as HiddenParamOpRelation
from .relation import PathClassification as PathClassification
from .report import CompilationReport as CompilationReport

# The lines that messages name are the user's own: neither ours nor those of the libraries below.
_compat.hide_from_tracebacks(
    _os.path.dirname(_os.path.dirname(__file__)),
    _os.path.dirname(_brainstate.__file__),
    _os.path.dirname(_brainunit.__file__),
    _os.path.dirname(str(_import_module(_brainunit.Quantity.__module__.partition(".")[0]).__file__)),
)
