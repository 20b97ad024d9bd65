"""The one error of the data floor: data that is missing, damaged or inconsistent.

Arguments that are wrong whatever the data are ``ValueError`` and are raised by the constructors.
What only reading the data can show is a ``DataError``: its message says which path was looked at,
what was expected there and what to do, so that a command line can print it alone, without a
traceback.
"""


class DataError(RuntimeError):
    """Data on disk cannot be used: missing, damaged, or inconsistent between its splits.

    Args:
        message: one line for the user.
    """

    def __init__(self, message: str) -> None:
        # A loader's worker sends an error as the text of its traceback, whose end is the message.
        super().__init__(message.rpartition(f"{__name__}.DataError: ")[2].strip())
