"""Where the texts of a corpus come from: Python's own documentation, folders of files, or any TFDS builder.

Each source is an iterator of documents, read as they are asked for, so that memory does not grow with a source.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from phase_jax.errors import UserError

KINDS = (".txt", ".jsonl", ".json")  # each also with .gz after it
_PASSAGE = 2**16  # characters of a .txt file that make one document


def python_documentation() -> Iterator[str]:
    """The topics of Python's language reference, which `help()` shows: about half a million characters."""
    from pydoc_data.topics import topics

    return (topics[name] for name in sorted(topics))


def folder_documents(folder: Path, field: str = "text") -> Iterator[str]:
    """Documents of all files under a folder, in the order of their names.

    A .jsonl or .json file has one document a line, under `field`; a .txt file is one document, or several that end at
    line ends where it is longer than 64 Ki characters. Any of them may be a .gz. Raises UserError for a folder without
    such files, and, when it comes to it, for a file that is not what its name says.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and _kind(path)]
    if not files:
        raise UserError(f"{folder} holds no file that ends in {', '.join(KINDS)} (or .gz of those)")
    return (document for path in files for document in _file_documents(path, field))


def tfds_documents(name: str, split: str = "train", data_dir: Path | None = None, field: str = "text") -> Iterator[str]:
    """Documents of a TFDS builder that was prepared as array_record, read without TensorFlow.

    Raises UserError for a name or split that TFDS does not know, a data set that is not prepared, or without `field`.
    """
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
        source = builder.as_data_source(split=split)
    except (tfds.core.DatasetNotFoundError, ImportError, AssertionError, ValueError, OSError, KeyError) as error:
        reason = " ".join(str(error).split()).partition(" Available datasets")[0][:300]  # TFDS lists all that it knows
        raise UserError(
            f"--tfds {name}, split '{split}': {reason.strip('.')}; where it is not prepared: tfds build {name}"
            " --file_format=array_record, and --data-dir where that is"
        ) from error
    if field not in builder.info.features:
        raise UserError(
            f"--tfds {name} has no field '{field}': choose one of {', '.join(sorted(builder.info.features))}"
        )
    return (_text(example[field], f"--tfds {name}", field) for example in source)


def _kind(path: Path) -> str | None:
    """How a file is read, by its name; None for files of other kinds."""
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return suffix if suffix in KINDS else None


def _file_documents(path: Path, field: str) -> Iterator[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            yield from _passages(file) if _kind(path) == ".txt" else _lines(file, path, field)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path} is not a whole gzip file ({error})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _passages(file: IO[str]) -> Iterator[str]:
    """A text in pieces that end at line ends; lines without end are cut."""
    while passage := file.read(_PASSAGE):
        yield passage + file.readline(_PASSAGE)


def _lines(file: IO[str], path: Path, field: str) -> Iterator[str]:
    """The field of each line."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where} is not JSON ({error})") from error
        if not isinstance(value, dict) or field not in value:
            found = f"its fields are {', '.join(value)}" if isinstance(value, dict) else "it is no object"
            raise UserError(f"{where} has no field '{field}': {found}; --field names another")
        yield _text(value[field], where, field)


def _text(value: str | bytes, where: str, field: str) -> str:
    """Raises UserError for what is no text."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: field '{field}' is not UTF-8 text") from error
    if not isinstance(value, str):
        raise UserError(f"{where}: field '{field}' is no text but {type(value).__name__}")
    return value
