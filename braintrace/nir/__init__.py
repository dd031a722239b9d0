"""Exchange of spiking networks with other simulators and with chips, by NIR.

The Neuromorphic Intermediate Representation (Pedersen et al., 2024; package `nir`) is a graph of neurons and
connections in continuous time. `load` makes a module of it that learns online, `save` writes one.
"""

from .. import _precision as _precision  # isort: skip

try:
    import nir as _nir  # noqa: F401
except ModuleNotFoundError as e:
    raise ModuleNotFoundError("`braintrace.nir` needs the package nir: `pip install braintrace[nir]`.") from e

from .errors import NIRError as NIRError
from .files import read as read
from .network import Network as Network
from .network import load as load
from .network import save as save
from .network import to_graph as to_graph
