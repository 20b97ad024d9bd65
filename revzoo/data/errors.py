"""The error for data that are missing, damaged or inconsistent.

Arguments that are wrong whatever the data are raise ``ValueError`` in the constructors. A
``DataError`` needs a look at the data: its message gives the path, what was expected there and what
to do, so that a command line can print it without a traceback.
"""


class DataError(RuntimeError):
    """Data on disk cannot be used: missing, damaged, or inconsistent between its splits.

    Args:
        message: one line for the user.
    """

    def __init__(self, message: str) -> None:
        # A loader's worker sends an error as the text of its traceback, whose end is the message.
        message = message.rpartition(f"{__name__}.DataError: ")[2].strip()
        # Paths may hold bytes that are not UTF-8, which no log file could take.
        super().__init__(message.encode("utf-8", "backslashreplace").decode())
