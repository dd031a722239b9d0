"""Online learning of recurrent and spiking networks, with eligibility traces, in JAX and brainstate."""

from typing import TYPE_CHECKING

from . import _precision as _precision
from . import nn as nn
from . import rules as rules
from ._compiler import CompilationError as CompilationError
from ._compiler import ETraceGraph as ETraceGraph
from ._compiler import HiddenGroup as HiddenGroup
from ._compiler import HiddenParamOpRelation as HiddenParamOpRelation
from ._compiler import HiddenPerturbation as HiddenPerturbation
from ._compiler import ModuleInfo as ModuleInfo
from ._compiler import NotSupportedError as NotSupportedError
from ._compiler import PathClassification as PathClassification
from ._compiler import add_hidden_perturbation_from_minfo as add_hidden_perturbation_from_minfo
from ._compiler import find_hidden_groups_from_minfo as find_hidden_groups_from_minfo
from ._compiler import find_hidden_param_op_relations_from_minfo as find_hidden_param_op_relations_from_minfo
from ._executor import ETraceGraphExecutor as ETraceGraphExecutor
from ._executor import ETraceVjpGraphExecutor as ETraceVjpGraphExecutor
from ._frontends import add_hidden_perturbation_in_module as add_hidden_perturbation_in_module
from ._frontends import compile_etrace_graph as compile_etrace_graph
from ._frontends import extract_module_info as extract_module_info
from ._frontends import find_hidden_groups_from_module as find_hidden_groups_from_module
from ._frontends import (
    find_hidden_param_op_relations_from_module as find_hidden_param_op_relations_from_module,
)
from ._learners import BPTT as BPTT
from ._learners import D_RTRL as D_RTRL
from ._learners import DNI as DNI
from ._learners import ES_D_RTRL as ES_D_RTRL
from ._learners import KF_RTRL as KF_RTRL
from ._learners import OSTTP as OSTTP
from ._learners import OTPE as OTPE
from ._learners import OTTT as OTTT
from ._learners import RFLO as RFLO
from ._learners import RTRL as RTRL
from ._learners import S_TLLR as S_TLLR
from ._learners import UORO as UORO
from ._learners import EligibilityTrace as EligibilityTrace
from ._learners import EProp as EProp
from ._learners import ETraceAlgorithm as ETraceAlgorithm
from ._learners import ETraceConfig as ETraceConfig
from ._learners import ETraceVjpAlgorithm as ETraceVjpAlgorithm
from ._learners import ETraceVmap as ETraceVmap
from ._learners import FixedRandomFeedback as FixedRandomFeedback
from ._learners import GradExpon as GradExpon
from ._learners import IODimVjpAlgorithm as IODimVjpAlgorithm
from ._learners import KappaFilter as KappaFilter
from ._learners import MultiStepData as MultiStepData
from ._learners import OSTLFeedforward as OSTLFeedforward
from ._learners import OSTLRecurrent as OSTLRecurrent
from ._learners import ParamDimVjpAlgorithm as ParamDimVjpAlgorithm
from ._learners import PresynapticTrace as PresynapticTrace
from ._learners import RandomProjectionVjpAlgorithm as RandomProjectionVjpAlgorithm
from ._learners import SingleStepData as SingleStepData
from ._learners import SnAp as SnAp
from ._learners import SyntheticGradient as SyntheticGradient
from ._learners import ThreeFactor as ThreeFactor
from ._learners import compile as compile
from ._learners import online as online
from ._learners import pp_prop as pp_prop
from ._learners import train_synthetic_gradient as train_synthetic_gradient
from ._legacy import ControlFlowPolicy as ControlFlowPolicy
from ._legacy import ConvOp as ConvOp
from ._legacy import ElemWiseOp as ElemWiseOp
from ._legacy import ElemWiseParam as ElemWiseParam
from ._legacy import ETraceOp as ETraceOp
from ._legacy import ETraceParam as ETraceParam
from ._legacy import LoraOp as LoraOp
from ._legacy import MatMulOp as MatMulOp
from ._legacy import NonTempParam as NonTempParam
from ._legacy import SpMatMulOp as SpMatMulOp
from ._loading import load_parameters as load_parameters
from ._ops import ETPPrimitive as ETPPrimitive
from ._ops import Term as Term
from ._ops import conv as conv
from ._ops import einsum as einsum
from ._ops import element_wise as element_wise
from ._ops import embedding as embedding
from ._ops import grouped_matmul as grouped_matmul
from ._ops import lora_matmul as lora_matmul
from ._ops import matmul as matmul
from ._ops import register_primitive as register_primitive
from ._ops import sparse_matmul as sparse_matmul
from ._report.check import GradientCheck as GradientCheck
from ._report.check import check_gradients as check_gradients
from ._report.diagnostics import CompilationRecord as CompilationRecord
from ._report.diagnostics import DiagnosticKind as DiagnosticKind
from ._report.diagnostics import DiagnosticLevel as DiagnosticLevel
from ._report.plan import Plan as Plan
from ._report.plan import plan as plan
from ._report.report import CompilationReport as CompilationReport
from ._report.verdict import DroppedPath as DroppedPath
from ._report.verdict import Exactness as Exactness

if TYPE_CHECKING:
    from ._train import Comparison as Comparison
    from ._train import DivergedError as DivergedError
    from ._train import FitResult as FitResult
    from ._train import LostProcessError as LostProcessError
    from ._train import compare as compare
    from ._train import fit as fit
    from ._train import save_curves as save_curves
    from ._train import show_curves as show_curves
    from ._train import write_report as write_report


_LATER = (
    *("fit", "FitResult", "DivergedError", "LostProcessError", "save_curves", "show_curves"),
    *("write_report", "compare", "Comparison"),
)


def __dir__() -> list[str]:
    return sorted({*globals(), "__version__", "nnx", "tasks", *_LATER})


def __getattr__(name: str) -> object:
    import importlib  # made when asked for, so that `import braintrace` stays quick

    if name in ("nnx", "tasks"):
        return importlib.import_module(f".{name}", __name__)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("braintrace")
        except PackageNotFoundError:
            raise AttributeError("`braintrace` is not installed here, so that it has no version.") from None
    if name in _LATER:
        return getattr(importlib.import_module("._train", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
