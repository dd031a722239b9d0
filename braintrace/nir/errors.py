"""The error of this package."""


class NIRError(ValueError):
    """Raised for a NIR file or graph that is damaged, and for a model that NIR cannot express.

    >>> import braintrace
    >>> issubclass(braintrace.nir.NIRError, ValueError)
    True
    """
