"""The one error of the data room."""


class DataError(ValueError):
    """Text that cannot be used as asked: names the key, the value and the remedy in one line."""
