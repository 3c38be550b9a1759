"""A journal cut, damaged and appended to at every place it can be."""

import numpy as np
import pytest

from phase_jax.errors import UserError
from phase_jax.evaluation.journal import open_journal

KEYS = [bytes([i]) * 32 for i in (0, 7, 255)]  # a key of zeros, and one that ends in bytes a text would lose
RECORDS = [
    (KEYS[:2], {"correct": np.array([True, False]), "nll": np.float32([[0.1, np.pi], [1e-30, 3e8]])}),
    (KEYS[2:], {"correct": np.array([True]), "nll": np.float32([[2.5, -0.0]])}),
]


def write(path):
    """The journal of RECORDS, and its length after each."""
    ends = []
    with open_journal(path) as journal:
        for keys, scores in RECORDS:
            journal.append(keys, scores)
            ends.append(path.stat().st_size)
    return ends


def content(path):
    with open_journal(path) as journal:
        return {key: {name: values.tolist() for name, values in row.items()} for key, row in journal.scores.items()}


def expected(records):
    return {
        key: {name: values[row].tolist() for name, values in scores.items()}
        for keys, scores in records
        for row, key in enumerate(keys)
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "test.journal"


def test_what_was_appended_is_read_back_exactly(path):
    write(path)
    assert content(path) == expected(RECORDS)
    with open_journal(path) as journal:
        for key, row in journal.scores.items():
            assert row["nll"].dtype == np.float32 and row["correct"].dtype == bool, key


def test_a_file_cut_anywhere_keeps_its_whole_records_and_goes_on(path):
    first, second = write(path)
    data = path.read_bytes()
    for length in range(0, second, 7):
        path.write_bytes(data[:length])
        whole = RECORDS[: int(length >= first)]
        assert content(path) == expected(whole), length
        assert path.stat().st_size == (first if whole else 0), "the torn tail is dropped"
        with open_journal(path) as journal:
            journal.append(*RECORDS[1])
        assert content(path) == expected([*whole, RECORDS[1]]), length


def test_a_damaged_byte_ends_the_file_before_its_record(path):
    first, second = write(path)
    data = path.read_bytes()
    for place in [*range(first, first + 8), *range(first + 8, second, 41)]:
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :])
        assert content(path) == expected(RECORDS[:1]), place


@pytest.mark.parametrize("tail", [bytes(8), bytes(4096), b"\xff" * 100, b"no journal at all"], ids=range(4))
def test_a_tail_of_anything_else_is_dropped(path, tail):
    write(path)
    with open(path, "ab") as file:
        file.write(tail)
    assert content(path) == expected(RECORDS)


def test_two_writers_are_one_too_many(path):
    with (
        open_journal(path),
        pytest.raises(UserError, match=r"test.journal is being written by another evaluation: wait"),
        open_journal(path),
    ):
        pass
    assert content(path) == {}


def test_a_journal_without_a_path_is_kept_in_memory():
    with open_journal(None) as journal:
        journal.append(*RECORDS[0])
        assert set(journal.scores) == set(KEYS[:2])
