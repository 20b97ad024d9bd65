"""TensorBoard's event files, written so that a full disk or a removed folder never ends a run.

Why not TensorBoard's own writer: after an error of the disk its thread ends with a traceback, and
the next figure raises. This one keeps the records and tries again with the next ones.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import FileWriter, SummaryWriter

log = logging.getLogger(__name__)

FLUSH_SECONDS = 120.0  # as TensorBoard's


class EventFile:
    """Appends events to a new file in ``folder``; torch's writers call it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = self._new_path()
        self._records = RecordWriter(self)
        self._pending: list[bytes] = []
        self._flushed = time.monotonic()
        self._failed = False  # whether the last attempt to write failed
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def get_logdir(self) -> str:
        return str(self._folder)

    def _new_path(self) -> Path:
        # TensorBoard reads the files of a folder in the order of their names
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        return self._folder / name

    def add_event(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def write(self, record: bytes) -> None:
        """Called by the ``RecordWriter``."""
        self._pending.append(record)

    def flush(self) -> None:
        """Append the new records; after an error of the disk, keep them for the next call."""
        self._flushed = time.monotonic()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(b"".join(self._pending))
        except OSError as error:
            # one message, not one for each record of a full disk
            if not self._failed:
                log.error("cannot write %s (%s): keeping its records, retrying", self._path, error)
            self._failed = True
            # the old file may end with half a record, where readers stop
            self._path = self._new_path()
        else:
            self._pending, self._failed = [], False

    close = flush


class _Files(FileWriter):
    def __init__(self, folder: str) -> None:
        self.event_writer = EventFile(Path(folder))


class EventWriter(SummaryWriter):
    """torch's writer of summaries, with an :class:`EventFile`."""

    file_writer: FileWriter | None  # type: ignore[assignment]
    all_writers: dict[str, FileWriter] | None  # type: ignore[assignment]

    def _get_file_writer(self) -> FileWriter:
        if self.file_writer is None:
            self.file_writer = _Files(self.log_dir)
            self.all_writers = {self.log_dir: self.file_writer}
            if self.purge_step is not None:
                # TensorBoard drops the figures of an earlier session from this step on
                start = SessionLog(status=SessionLog.START)
                self.file_writer.add_event(Event(session_log=start), self.purge_step)
                self.purge_step = None
        return self.file_writer
