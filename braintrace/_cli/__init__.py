"""The command `braintrace`: train, look at, check, plan and time models from a shell."""

from .main import main as main
