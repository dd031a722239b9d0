"""Online learning of recurrent and spiking networks, with eligibility traces, in JAX and brainstate.

Names are imported when they are first used, so that the command line starts quickly.
"""

import os
import sys
from typing import TYPE_CHECKING

# `import brainstate` must come through `_precision`, before a user's own. Only the command line can wait.
if (sys.argv or [""])[0] != "-m" and os.path.basename((sys.argv or [""])[0]) != "braintrace":
    from . import _precision as _precision

if TYPE_CHECKING:
    from . import agents as agents
    from . import nn as nn
    from . import rules as rules
    from ._compiler import *
    from ._diagnostics.records import *
    from ._diagnostics.verdict import *
    from ._executor import *
    from ._frontends import *
    from ._learners.accumulators import *
    from ._learners.compile import *
    from ._learners.config import *
    from ._learners.dni import *
    from ._learners.gradient_check import *
    from ._learners.learner import *
    from ._learners.learners import *
    from ._learners.models import *
    from ._learners.online import *
    from ._learners.stateful import *
    from ._learners.trace_states import *
    from ._legacy import *
    from ._loading import *
    from ._online.arguments import *
    from ._ops import *
    from ._report.check import *
    from ._report.plan import *
    from ._report.report import *
    from ._train import *

_SUBMODULES = ("agents", "nir", "nn", "nnx", "rules", "tasks")
_HOMES = {
    "_compiler": (
        "CompilationError HiddenGroup HiddenParamOpRelation HiddenPerturbation ModuleInfo "
        "NotSupportedError PathClassification add_hidden_perturbation_from_minfo "
        "find_hidden_groups_from_minfo find_hidden_param_op_relations_from_minfo"
    ),
    "_executor": "ETraceGraphExecutor ETraceVjpGraphExecutor",
    "_frontends": (
        "add_hidden_perturbation_in_module compile_etrace_graph extract_module_info "
        "find_hidden_groups_from_module find_hidden_param_op_relations_from_module"
    ),
    "_learners.accumulators": "FixedRandomFeedback GradExpon KappaFilter PresynapticTrace",
    "_learners.compile": "ETraceVmap compile",
    "_learners.config": "ETraceConfig",
    "_learners.dni": "DNI SyntheticGradient train_synthetic_gradient",
    "_learners.gradient_check": "check_gradients",
    "_learners.learner": "Learner",
    "_learners.learners": (
        "BPTT D_RTRL EProp ES_D_RTRL IODimVjpAlgorithm KF_RTRL OSTLFeedforward OSTLRecurrent OSTTP OTPE OTTT "
        "ParamDimVjpAlgorithm RFLO RTRL RandomProjectionVjpAlgorithm S_TLLR SnAp ThreeFactor UORO pp_prop"
    ),
    "_learners.models": "compare plan",
    "_learners.online": "online",
    "_learners.stateful": "ETraceAlgorithm ETraceVjpAlgorithm",
    "_learners.trace_states": "EligibilityTrace",
    "_online.arguments": "MultiStepData SingleStepData",
    "_legacy": (
        "ControlFlowPolicy ConvOp ElemWiseOp ElemWiseParam ETraceOp ETraceParam LoraOp MatMulOp NonTempParam "
        "SpMatMulOp"
    ),
    "_loading": "load_parameters",
    "_ops": (
        "ETPPrimitive Term conv einsum element_wise embedding grouped_matmul lora_matmul matmul "
        "register_primitive sparse_matmul"
    ),
    "_report.check": "GradientCheck",
    "_diagnostics.records": "CompilationRecord DiagnosticKind DiagnosticLevel",
    "_report.plan": "Plan",
    "_report.report": "CompilationReport ETraceGraph",
    "_diagnostics.verdict": "DroppedPath Exactness",
    "_train": (
        "Comparison DivergedError FitResult LostProcessError Stream adaptive_obgd fit obgd "
        "save_curves show_curves write_report"
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = [*_HOME_OF]  # noqa: PLE0604


def __dir__() -> list[str]:
    return sorted({*globals(), "__version__", *_SUBMODULES, *_HOME_OF})


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("braintrace")
        except PackageNotFoundError:
            raise AttributeError("`braintrace` is not installed here, so that it has no version.") from None
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("._precision", __name__)
    value = globals()[name] = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    return value
