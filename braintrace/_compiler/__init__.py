"""The compiler: from one step of a model to its trace graph of sites, hidden groups and relations."""

import os as _os

from .. import _compat
from .errors import CompilationError as CompilationError
from .errors import NotSupportedError as NotSupportedError
from .exactness import RuleKind as RuleKind
from .graph import add_hidden_perturbation_from_minfo as add_hidden_perturbation_from_minfo
from .graph import find_hidden_groups_from_minfo as find_hidden_groups_from_minfo
from .graph import find_hidden_param_op_relations_from_minfo as find_hidden_param_op_relations_from_minfo
from .groups import HiddenGroup as HiddenGroup
from .module_info import ModuleInfo as ModuleInfo
from .perturbation import HiddenPerturbation as HiddenPerturbation
from .relation import HiddenParamOpRelation as HiddenParamOpRelation
from .relation import PathClassification as PathClassification

# messages name the user's source lines, not those of this package
_compat.hide_from_tracebacks(_os.path.dirname(_os.path.dirname(__file__)))
