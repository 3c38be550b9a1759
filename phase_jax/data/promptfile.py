"""Prompts in one file, for any system to read: an uncompressed .npz whose largest array is written as it is made.

Members, all little-endian int32, of n logical samples on R residues, m records, T tokens:

    tokens           [n, R, T]  the prompts
    answer           [n]        the token that is right after each of them
    record_position  [n, R, m]  where each record's key stands, in the order of the records
    target_position  [n, R]     where the asked key stands; residue r of the R is its position mod R
    rank             [n]        which record is asked for
    manifest         [bytes]    JSON in UTF-8: what the prompts were made of, and the SHA-256 of every array's bytes

The file comes into being whole or not at all.
"""

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from phase_jax.data.padding import DistractorDependence
from phase_jax.data.prompts import PhasePrompts
from phase_jax.data.tasks import Task
from phase_jax.data.tokenizers import Tokenizer
from phase_jax.errors import UserError

FORMAT = "phase-jax prompts 1"
ARRAYS = ("tokens", "answer", "record_position", "target_position", "rank")
_INT = np.dtype("<i4")
_CHUNK = 1 << 22  # bytes hashed at once


def write_prompts(path: Path, task: Task, tokenizer: Tokenizer, describe: dict, done: Callable[[int], None]) -> dict:
    """Writes a task's prompts and returns the manifest; `describe` is stored in it too.

    Calls `done` with the number of logical samples that are made. Raises UserError, and leaves nothing behind, where
    the disk does not take the file.
    """
    n, residues, m = task.samples, task.residues, task.records
    position = np.empty((n, residues, m), _INT)
    answer = np.empty(n, _INT)
    dependence = DistractorDependence(residues)

    def rows() -> Iterator[np.ndarray]:
        for i, sample in enumerate(task):
            position[i], answer[i] = sample.record_position, sample.answer
            dependence.add(position[i, None], task.placement.rank[i, None])
            yield sample.tokens
            done(i + 1)

    size = _INT.itemsize * n * residues * (task.tokens + m)
    with _whole_file(path, size) as archive:
        hashes = {"tokens": _write_array(archive, "tokens", (n, residues, task.tokens), _INT, rows())}
        small = {
            "answer": answer,
            "record_position": position,
            "target_position": task.placement.position,
            "rank": task.placement.rank,
        }
        for name, values in small.items():
            hashes[name] = _write_array(archive, name, values.shape, _INT, [values])
        lexicon = task.lexicon
        manifest = {
            "format": FORMAT,
            **describe,
            "protocol": task.protocol,
            "tokens": task.tokens,
            "records": m,
            "residues": residues,
            "samples": n,
            "demonstrations": task.demonstrations,
            "closing_filler": task.closing_filler,
            "seed": task.seed,
            "query_position": task.tokens - 1,
            "record_length": lexicon.record_length,
            "after_key": lexicon.after_key,
            "after_value": lexicon.after_value,
            "bos": lexicon.bos,
            "tokenizer": {"name": tokenizer.name, "size": tokenizer.size, "sha256": tokenizer.hash},
            "checks": task.checks(dependence),
            "sha256": hashes,
        }
        text = np.frombuffer(json.dumps(manifest, allow_nan=False).encode(), np.uint8)
        _write_array(archive, "manifest", text.shape, text.dtype, [text])
    return manifest


def read_prompts(path: Path) -> tuple[PhasePrompts, dict]:
    """The prompts and their manifest; every array is checked against its hash, and `tokens` stays on the disk.

    Raises UserError for a file that is not such prompts, is cut short, or is not what was written.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(bytes(_read_array(archive, "manifest")))
            if manifest["format"] != FORMAT:
                raise UserError(f"{path} is of the format '{manifest['format']}', not '{FORMAT}': make it anew")
            for name in ARRAYS:
                if _hash_of(archive, name) != manifest["sha256"][name]:
                    raise UserError(f"{path}: '{name}' is not what was written (its SHA-256 differs): make it anew")
            small = {name: _read_array(archive, name) for name in ARRAYS[1:]}
            tokens = _map_array(archive, path, "tokens")
    except (OSError, EOFError, KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is no whole file of prompts ({error}): make it with phase-jax prompts") from error
    return PhasePrompts(tokens, **small, checks=manifest["checks"]), manifest


@contextmanager
def _whole_file(path: Path, size: int) -> Iterator[zipfile.ZipFile]:
    """A new archive that takes its name when all of it is on the disk, and is removed if anything fails before."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < size:
            raise UserError(f"{path} takes {size / 2**20:,.1f} MiB, which the disk does not have: choose another --out")
        with open(partial, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                yield archive
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path} could not be written ({error.strerror}): nothing of it was kept") from error
    finally:
        partial.unlink(missing_ok=True)


def _write_array(
    archive: zipfile.ZipFile, name: str, shape: tuple[int, ...], dtype: np.dtype, parts: Iterable[np.ndarray]
) -> str:
    """Writes an array that comes in parts, in order; returns the SHA-256 of its bytes."""
    digest = hashlib.sha256()
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(member, header)
        for part in parts:
            content = np.ascontiguousarray(part, dtype).data.cast("B")
            digest.update(content)
            member.write(content)
    return digest.hexdigest()


def _read_header(member) -> tuple[tuple[int, ...], np.dtype]:
    """(shape, type) of a member that stands at its beginning, and then behind its header."""
    np.lib.format.read_magic(member)
    shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    return shape, dtype


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _hash_of(archive: zipfile.ZipFile, name: str) -> str:
    """SHA-256 of an array's bytes, a piece at a time."""
    digest = hashlib.sha256()
    with archive.open(f"{name}.npy") as member:
        _read_header(member)
        while content := member.read(_CHUNK):
            digest.update(content)
    return digest.hexdigest()


def _map_array(archive: zipfile.ZipFile, path: Path, name: str) -> np.memmap:
    """An array of the archive as a read-only map of the file: members are not compressed, so it lies there as it is."""
    info = archive.getinfo(f"{name}.npy")
    with open(path, "rb") as file:
        # The member's own header: 26 bytes on are the lengths of its name and of its extra field, then both.
        file.seek(info.header_offset + 26)
        after = sum(int.from_bytes(file.read(2), "little") for _ in range(2))
        file.seek(after, os.SEEK_CUR)
        shape, dtype = _read_header(file)
        return np.memmap(path, dtype, "r", file.tell(), shape)
