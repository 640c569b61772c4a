"""The error type of the data package."""


class DataError(ValueError):
    """Text that cannot be used as configured: one line names the key, the value and the remedy."""
