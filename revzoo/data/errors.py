"""The error for data that are missing, damaged or inconsistent.

Constructors raise ``ValueError`` for arguments that are wrong for any data. A ``DataError`` depends
on the files: its message gives the path, the expected content and the remedy. The command line
prints it without a traceback.
"""

from revzoo._checks import UserError


class DataError(UserError, RuntimeError):
    """Data on disk cannot be used: missing, damaged, or inconsistent between its splits.

    Args:
        message: one line for the user.
        reason: for a file: the fault without its path, equal for equal faults.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        self.reason = reason
        # a loader's worker sends its traceback as text, which ends with the message
        message = message.rpartition(f"{__name__}.DataError: ")[2].strip()
        # a path may hold bytes that are not UTF-8, which a log file cannot
        super().__init__(message.encode("utf-8", "backslashreplace").decode())
