"""Scores as they come: an append-only file that stays readable however its writer ends.

A record is the length of its payload and a CRC-32 of length and payload (little-endian, 32 bits each), then the
payload: an npz with the scores of some samples and their keys. The first record that is torn or damaged ends the file.
"""

import fcntl
import io
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from phase_jax.errors import UserError

_NUMBER = struct.Struct("<I")
_KEYS = "keys"


class Journal:
    """`scores`, by key, of every sample that was ever appended: {name: array} each."""

    def __init__(self, file: BinaryIO):
        """Reads the file, drops its torn tail, and appends from there on."""
        self.scores: dict[bytes, dict[str, np.ndarray]] = {}
        self._file = file
        file.seek(0)
        whole = 0
        for payload, end in _records(file.read()):
            with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
                scores = dict(arrays)
            self._add([key.tobytes() for key in scores.pop(_KEYS)], scores)
            whole = end
        file.truncate(whole)
        file.seek(whole)

    def append(self, keys: Sequence[bytes], scores: Mapping[str, np.ndarray]) -> None:
        """Writes arrays of one row a key, in one piece; they are with the operating system when this returns."""
        buffer = io.BytesIO()
        np.savez(buffer, **{_KEYS: np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)}, **scores)
        payload = buffer.getvalue()
        length = _NUMBER.pack(len(payload))
        self._file.write(length + _NUMBER.pack(zlib.crc32(length + payload)) + payload)
        self._file.flush()
        self._add(keys, scores)

    def _add(self, keys: Sequence[bytes], scores: Mapping[str, np.ndarray]) -> None:
        for row, key in enumerate(keys):
            self.scores[key] = {name: values[row] for name, values in scores.items()}


def _records(data: bytes) -> Iterator[tuple[bytes, int]]:
    """(payload, where it ends) of every record before the first that is torn or damaged."""
    end = 0
    while True:
        length, checksum, start = data[end : end + 4], data[end + 4 : end + 8], end + 8
        if len(checksum) < 4:
            return
        end = start + _NUMBER.unpack(length)[0]
        payload = data[start:end]
        # A tail of zeros, as a crash of the machine may leave it, fails too: the sum is taken over the length as well.
        if len(payload) < end - start or _NUMBER.unpack(checksum)[0] != zlib.crc32(length + payload):
            return
        yield payload, end


@contextmanager
def open_journal(path: Path | None) -> Iterator[Journal]:
    """The journal at `path`, made where there is none and locked; None is one in memory.

    Raises UserError where another process writes it.
    """
    if path is None:
        yield Journal(io.BytesIO())
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path} is being written by another evaluation: wait until it has ended") from None
        yield Journal(file)
