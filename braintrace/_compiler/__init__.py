"""A model's step -> its trace graph: sites, hidden groups, relations and outcomes."""

import os as _os

from .. import _compat
from .errors import CompilationError as CompilationError
from .errors import NotSupportedError as NotSupportedError
from .exactness import RuleKind as RuleKind
from .graph import ETraceGraph as ETraceGraph
from .graph import add_hidden_perturbation_from_minfo as add_hidden_perturbation_from_minfo
from .graph import find_hidden_groups_from_minfo as find_hidden_groups_from_minfo
from .graph import find_hidden_param_op_relations_from_minfo as find_hidden_param_op_relations_from_minfo
from .groups import HiddenGroup as HiddenGroup
from .module_info import ModuleInfo as ModuleInfo
from .perturbation import HiddenPerturbation as HiddenPerturbation
from .relation import HiddenParamOpRelation as HiddenParamOpRelation
from .relation import PathClassification as PathClassification

# the lines that messages name are the user's own, not ours
_compat.hide_from_tracebacks(_os.path.dirname(_os.path.dirname(__file__)))
