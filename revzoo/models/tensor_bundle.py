"""Reads TensorFlow's checkpoints (``tf.train.Saver``, format V2) without TensorFlow.

A checkpoint ``NAME`` is a *tensor bundle*. We read two of its files:

=============================  =============================================================
``NAME.index``                 name of each variable -> type, shape, place of its values
``NAME.data-00000-of-00001``   the values, one variable after the other
=============================  =============================================================

The index is a table of LevelDB. Its last 48 bytes are the footer: the handles of two blocks (offset
and size, as varints), zeros, and a magic number. The second handle leads to the index block, whose
values are the handles of the data blocks. A block and its trailer are

    entries | restart points, 4 bytes each | their number, 4 bytes || compression, 1 byte | CRC32C

An entry is three varints (the number of bytes that its key shares with the key before it, then the
lengths of the rest of the key and of the value), the rest of the key, and the value. The values are
messages of Protocol Buffers: ``BundleHeaderProto`` under the empty key, ``BundleEntryProto`` under
the names.

Reading runs no code and checks every size before it allocates. The checksums of the index are
verified. Those of the values are not: Python would need 0.1 s for each MiB.

Sources: ``doc/table_format.md`` of LevelDB, ``tensor_bundle.proto`` of TensorFlow.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from revzoo.weights.errors import UnreadableWeightsError

SUFFIX = ".index"
DATA_SUFFIX = ".data-00000-of-00001"
FOOTER_BYTES = 48
MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
# a key may repeat the one before it, so without a limit few bytes give many long names
LONGEST_NAME = 1000
MOST_DIMENSIONS = 32
# numbers of TensorFlow's DataType
DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 19: "<f2"}
# bytes of the kinds of Protocol Buffers' fields that have a fixed size
FIXED = {1: 8, 5: 4}


class _Entry(NamedTuple):
    """Type, shape and place of the values of one variable; offset and end in bytes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    end: int


def read_tensor_bundle(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The variables of a checkpoint by name, in TensorFlow's layout.

    Args:
        path: ``NAME.index``, with ``NAME.data-00000-of-00001`` beside it.

    Raises:
        OSError: a file cannot be opened.
        UnreadableWeightsError: a file is damaged, cut off or of another format; or the checkpoint
            is compressed, partitioned, big-endian or in several data files, or has a type other
            than float16, float32, float64, int32 and int64.
    """
    if path.suffix != SUFFIX:
        raise UnreadableWeightsError(
            f"{path} is not the index of a TensorFlow checkpoint: expected NAME{SUFFIX}, with "
            f"NAME{DATA_SUFFIX} beside it. TensorFlow's older format, one file, must be restored "
            "and saved again in TensorFlow"
        )
    table, data_path = path.read_bytes(), path.with_suffix(DATA_SUFFIX)
    try:
        entries = {name: _entry(value, f"{path}: {name}") for name, value in _rows(table, path)}
    # what unexpected bytes raise
    except (ValueError, TypeError, IndexError, struct.error) as error:
        raise UnreadableWeightsError(
            f"{path} is damaged, cut off or not the index of a TensorFlow checkpoint ({error}): "
            "fetch it again"
        ) from None
    arrays = {}
    with data_path.open("rb") as file:
        held = data_path.stat().st_size
        # the sum, too: variables that share a place would need more memory than the file has
        total = sum(entry.end - entry.offset for entry in entries.values())
        needed = max(total, *(entry.end for entry in entries.values()), 0)
        if needed > held:
            raise UnreadableWeightsError(
                f"{data_path} has {held:,} bytes, expected at least {needed:,}: it is cut off or "
                f"belongs to another checkpoint than {path.name}. Fetch both files again"
            )
        for name, (dtype, shape, offset, _) in entries.items():
            file.seek(offset)
            arrays[name] = np.fromfile(file, dtype, math.prod(shape)).reshape(shape)
    return arrays


def _rows(table: bytes, path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and messages of the variables, after a check of the header."""
    footer = table[-FOOTER_BYTES:]
    if len(footer) < FOOTER_BYTES or footer[-8:] != MAGIC:
        raise ValueError(f"it ends with {footer[-8:].hex()}, expected {MAGIC.hex()}")
    *_, after = _handle(footer, 0)  # the first block has no variables
    offset, size, _ = _handle(footer, after)
    before: bytes | None = None
    for _, place in _entries(_block(table, offset, size, path)):
        offset, size, _ = _handle(place, 0)
        for key, value in _entries(_block(table, offset, size, path)):
            if before is None and not key:
                _check_header(value, path)
            elif before is None or key <= before:
                raise ValueError(
                    f"{key!r} follows {before!r}, expected a header, then sorted names"
                )
            else:
                yield key.decode(), value
            before = key


def _block(table: bytes, offset: int, size: int, path: Path) -> bytes:
    """The content of a block, after a check of its trailer."""
    # imported only when needed; it does not import TensorFlow
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    end = offset + size
    compression, expected = struct.unpack("<BI", table[end : end + 5])
    if (got := masked_crc32c(table[offset : end + 1])) != expected:
        raise ValueError(f"checksum {got:08x} of the block at {offset}, expected {expected:08x}")
    if compression:
        raise UnreadableWeightsError(
            f"{path} is compressed (type {compression}, 1 is Snappy): expected no compression. "
            "Restore it and save it again in a current TensorFlow, which compresses nothing"
        )
    return table[offset:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block."""
    (restarts,) = struct.unpack("<I", block[-4:])
    end, at, key = len(block) - 4 * (restarts + 1), 0, b""
    while at < end:
        shared, at = _varint(block, at)
        rest, at = _varint(block, at)
        size, at = _varint(block, at)
        if shared > len(key) or shared + rest > LONGEST_NAME or at + rest + size > end:
            raise ValueError(f"an entry of {shared} + {rest} and {size} bytes does not fit")
        key = key[:shared] + block[at : at + rest]
        at += rest
        yield key, block[at : at + size]
        at += size


def _check_header(message: bytes, path: Path) -> None:
    """Refuse bundles of several data files, and big-endian ones."""
    fields = dict(_fields(message))
    files, big_endian = fields.get(1, 0), bool(fields.get(2, 0))
    if files != 1 or big_endian:
        raise UnreadableWeightsError(
            f"{path} describes {files} data files, {'big' if big_endian else 'little'}-endian: "
            "expected 1, little-endian. Restore it and save it again in TensorFlow, with "
            "tf.train.Saver(sharded=False)"
        )


def _entry(message: bytes, where: str) -> _Entry:
    """A ``BundleEntryProto``: fields 1 dtype, 2 shape, 3 file, 4 offset, 5 size, 7 slices."""
    fields = dict(_fields(message))
    if 7 in fields:
        raise UnreadableWeightsError(
            f"{where} is stored in slices: expected whole variables. Restore the checkpoint and "
            "save it again in TensorFlow, without a partitioner"
        )
    if fields.get(1) not in DTYPES:
        raise UnreadableWeightsError(
            f"{where} has type {fields.get(1)} of TensorFlow's DataType; expected one of "
            f"{', '.join(np.dtype(d).name for d in DTYPES.values())}. Save a checkpoint without it"
        )
    # TensorShapeProto: field 2 is a dimension, whose field 1 is its size; zeros are omitted
    dimensions = (value for number, value in _fields(fields.get(2, b"")) if number == 2)
    shape = tuple(dict(_fields(dimension)).get(1, 0) for dimension in dimensions)
    dtype, size = np.dtype(DTYPES[fields[1]]), fields.get(5, 0)
    if len(shape) > MOST_DIMENSIONS or math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{where} of shape {shape} and type {dtype} has {size} bytes")
    offset = fields.get(4, 0)
    return _Entry(dtype, shape, offset, offset + size)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message's fields: integers, or bytes if they are no varints."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        size, at = (FIXED[kind], at) if kind in FIXED else _varint(message, at)
        if at + size > len(message):
            raise ValueError(f"a field of {size} bytes ends after its message")
        yield number, message[at : at + size]
        at += size


def _handle(data: bytes, at: int) -> tuple[int, int, int]:
    """Offset and size of a block, and the place after them."""
    offset, at = _varint(data, at)
    return offset, *_varint(data, at)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned number of seven bits a byte, lowest first, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("a number is longer than ten bytes")
