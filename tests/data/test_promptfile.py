"""The file of prompts: what is read is what was written, and anything else is refused."""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from phase_jax.data.promptfile import ARRAYS, FORMAT, read_prompts, write_prompts
from phase_jax.data.tokenizers import ByteTokenizer
from phase_jax.errors import UserError
from tests.data.test_tasks import made


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(path, task, manifest) of a small file; the path is not to be changed."""
    path, task = tmp_path_factory.mktemp("prompts") / "p.npz", made(protocol="insequence")
    counted = []
    manifest = write_prompts(path, task, ByteTokenizer(), {"task": "needle"}, counted.append)
    assert counted == list(range(1, 13))
    assert [file.name for file in path.parent.iterdir()] == ["p.npz"]
    return path, task, manifest


def test_what_is_read_is_what_was_made(written):
    path, task, manifest = written
    prompts, read = read_prompts(path)
    assert read == json.loads(json.dumps(manifest))
    for i, sample in enumerate(task):
        np.testing.assert_array_equal(prompts.tokens[i], sample.tokens)
        np.testing.assert_array_equal(prompts.record_position[i], sample.record_position)
        assert prompts.answer[i] == sample.answer
    np.testing.assert_array_equal(prompts.target_position, task.placement.position)
    np.testing.assert_array_equal(prompts.rank, task.placement.rank)
    assert isinstance(prompts.tokens, np.memmap) and not prompts.tokens.flags.writeable
    assert prompts.checks == read["checks"] and read["checks"]["matched"] is False, "12 samples are too few for 1 %"
    assert (read["format"], read["query_position"], read["record_length"], read["bos"]) == (FORMAT, 399, 4, 702)
    assert read["tokenizer"] == {"name": "bytes", "size": 258, "sha256": ByteTokenizer.hash}


def test_numpy_alone_reads_it(written):
    with np.load(written[0]) as file:
        assert set(file.files) == {*ARRAYS, "manifest"}
        told = json.loads(file["manifest"].tobytes())
        for name in ARRAYS:
            assert file[name].dtype == np.int32
            assert hashlib.sha256(file[name].tobytes()).hexdigest() == told["sha256"][name]
        assert file["tokens"].shape == (12, 8, 400)
        target = np.take_along_axis(file["tokens"], file["target_position"][..., None] + 2, axis=2)[..., 0]
        assert (target == file["answer"][:, None]).all()


def rewritten(path, to, change):
    """A copy whose members are what `change(name, bytes)` says, a sound archive again."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(to, "w") as archive:
        for name in source.namelist():
            if (content := change(name, source.read(name))) is not None:
                archive.writestr(name, content)


def test_a_file_cut_short_anywhere_is_refused(written, tmp_path):
    content = written[0].read_bytes()
    cut = tmp_path / "cut.npz"
    for kept in (0, 1, 1000, len(content) // 2, len(content) - 100, len(content) - 1):
        cut.write_bytes(content[:kept])
        with pytest.raises(UserError, match=r"cut\.npz is no whole file of prompts \(.+\): make it with") as raised:
            read_prompts(cut)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", [*ARRAYS, "manifest"])
def test_an_altered_byte_is_found_in_every_array(written, name, tmp_path):
    with zipfile.ZipFile(written[0]) as archive:
        content = archive.read(f"{name}.npy")
    whole = bytearray(written[0].read_bytes())
    whole[whole.index(content) + len(content) - 3] ^= 1
    (tmp_path / "p.npz").write_bytes(whole)
    with pytest.raises(UserError, match=r"no whole file of prompts \(Bad CRC-32"):
        read_prompts(tmp_path / "p.npz")


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_put_in_another_place_is_told_by_its_hash(written, name, tmp_path):
    def change(member, content):
        return content[:-4] + b"\1\2\3\0" if member == f"{name}.npy" else content

    rewritten(written[0], tmp_path / "p.npz", change)
    with pytest.raises(UserError, match=rf"'{name}' is not what was written \(its SHA-256 differs\)"):
        read_prompts(tmp_path / "p.npz")


def test_files_of_other_kinds_are_refused(written, tmp_path):
    path = tmp_path / "p.npz"
    with pytest.raises(UserError, match="no whole file of prompts"):
        read_prompts(path)
    np.savez(path, tokens=np.zeros(3))
    with pytest.raises(UserError, match="no whole file of prompts"):
        read_prompts(path)
    rewritten(written[0], path, lambda name, content: content.replace(FORMAT.encode(), b"phase-jax prompts 9"))
    with pytest.raises(UserError, match="is of the format 'phase-jax prompts 9'"):
        read_prompts(path)
    rewritten(written[0], path, lambda name, content: None if name == "rank.npy" else content)
    with pytest.raises(UserError, match="no whole file of prompts"):
        read_prompts(path)


def test_a_writer_that_is_stopped_leaves_nothing_and_keeps_what_was_there(written, tmp_path):
    shutil.copy(written[0], tmp_path / "p.npz")

    def stop(done):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_prompts(tmp_path / "p.npz", made(seed=3), ByteTokenizer(), {}, stop)
    assert [file.name for file in tmp_path.iterdir()] == ["p.npz"]
    assert (tmp_path / "p.npz").read_bytes() == written[0].read_bytes()


def test_a_disk_that_has_not_the_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"p\.npz takes 0\.2 MiB, which the disk does not have: choose another --out"):
        write_prompts(tmp_path / "deeper" / "p.npz", made(), ByteTokenizer(), {}, lambda done: None)
    assert not list((tmp_path / "deeper").iterdir())


@pytest.mark.parametrize("limit", [100, 100_000])
def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(limit, tmp_path):
    """The kernel refuses to write beyond a limit of the process's own, as it does on a full disk."""
    code = f"""
import resource, pathlib
from phase_jax.data.promptfile import write_prompts
from phase_jax.data.tokenizers import ByteTokenizer
from phase_jax.errors import UserError
from tests.data.test_tasks import made
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    write_prompts(pathlib.Path({str(tmp_path)!r}) / "p.npz", made(), ByteTokenizer(), {{}}, lambda done: None)
except UserError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr == ""
    assert run.stdout == f"{tmp_path}/p.npz could not be written (File too large): nothing of it was kept\n"
    assert not list(tmp_path.iterdir())
