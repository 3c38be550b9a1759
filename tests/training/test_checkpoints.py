"""Checkpoints: what is altered, torn or another run's is refused by name, and the one before it is used."""

import dataclasses
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phase_jax.errors import UserError
from phase_jax.training import checkpoints as ckpt
from phase_jax.training.step import TrainState
from tests.runs import tiny_run

ROOT = Path(__file__).parents[2]
CONFIG = tiny_run()


def state_at(step, rows=64):
    """A state whose leaves are functions of the step; the numbers do not compress."""
    rng = np.random.default_rng(step)
    return TrainState(
        jnp.asarray(step, jnp.int32),
        {
            "up": jnp.asarray(rng.normal(size=(rows, 8)), jnp.float32),
            "small": jnp.asarray(rng.normal(size=16), jnp.bfloat16),
        },
        {"count": jnp.asarray(3 * step, jnp.int32)},
    )


LIKE = jax.eval_shape(lambda: state_at(0))


def write(folder, *steps, config=CONFIG, keep=5):
    with ckpt.open_checkpoints(folder, keep) as saved:
        for step in steps:
            ckpt.save(saved, state_at(step), config, {"next_index": step})
    return folder


def read(folder, config=CONFIG, like=LIKE, **options):
    with ckpt.open_checkpoints(folder) as saved:
        return ckpt.restore(saved, like, config, **options)


def assert_is(found, step):
    assert found.data == {"next_index": step}
    jax.tree.map(np.testing.assert_array_equal, found.state, state_at(step))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return write(tmp_path_factory.mktemp("two") / "checkpoints", 4, 8)


@pytest.fixture
def copy(two, tmp_path):
    return Path(shutil.copytree(two, tmp_path / "checkpoints"))


def mixed(x):
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) % 2**32
    return x


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_checksum_is_the_sum_over_all_numbers_of_their_bits_mixed_with_their_place(dtype):
    x = jnp.asarray(10 * np.random.default_rng(0).normal(size=(3, 5, 2)), dtype)
    bits = np.frombuffer(np.asarray(x).tobytes(), f"<u{x.dtype.itemsize}")
    high, low = (
        sum(mixed(int(bit) ^ mixed(place ^ seed)) for place, bit in enumerate(bits)) % 2**32 for seed in (0, 0x9E3779B9)
    )
    assert ckpt.checksums({"a": [x]}) == {"a/0": f"{dtype}[3, 5, 2] {high:08x}{low:08x}"}


def test_every_single_bit_and_every_exchange_changes_the_checksum():
    x = np.arange(32, dtype=np.int32)
    altered = [x.copy() for _ in range(32)] + [x.copy() for _ in range(31)]
    for bit in range(32):
        altered[bit].view(np.uint32)[7] ^= np.uint32(1 << bit)
    for i in range(31):
        altered[32 + i][[i, i + 1]] = altered[32 + i][[i + 1, i]]
    sums = ckpt.checksums([jnp.asarray(y) for y in [x, *altered]])
    assert len(set(sums.values())) == 1 + len(altered)


def test_the_newest_checkpoint_comes_back_with_where_the_data_stood(two):
    assert_is(read(two), 8)


def test_a_flipped_bit_is_never_used(two, tmp_path, capsys):
    """Wherever it is in the newest checkpoint: it was in nothing that is read, or the one before is used."""
    rng, said = np.random.default_rng(0), ""
    files = sorted(path for path in (two / "8").rglob("*") if path.is_file() and path.stat().st_size)
    largest = max(files, key=lambda path: path.stat().st_size)
    for i, file in enumerate([*files, *[largest] * 6]):
        folder = Path(shutil.copytree(two, tmp_path / str(i)))
        altered = folder / file.relative_to(two)
        content = bytearray(altered.read_bytes())
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        altered.write_bytes(content)
        found = read(folder)
        assert_is(found, int(found.state.step))
        said += capsys.readouterr().err
    assert "differs from its checksum" in said


@pytest.mark.parametrize("what", ["state/manifest.ocdbt", "_CHECKPOINT_METADATA", "state/_METADATA", "state"])
def test_a_torn_checkpoint_is_named_and_the_one_before_it_used(copy, what, capsys):
    torn = copy / "8" / what
    shutil.rmtree(torn) if torn.is_dir() else torn.write_bytes(torn.read_bytes()[:10])
    assert_is(read(copy), 4)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith(f"{copy / '8'} is refused: it")


def test_a_checkpoint_of_another_run_is_named_and_the_one_before_it_used(copy, tmp_path, capsys):
    write(tmp_path / "other", 12, config=dataclasses.replace(CONFIG, seed=8))
    shutil.copytree(tmp_path / "other" / "12", copy / "12")
    assert_is(read(copy), 8)
    assert capsys.readouterr().err == f"{copy / '12'} is refused: it is of another run (seed is 8, not 7)\n"


def test_a_checkpoint_of_another_shape_is_refused(two, capsys):
    with pytest.raises(UserError, match=r"no checkpoint in .* can be used, for the reasons above: remove it"):
        read(two, like=jax.eval_shape(lambda: state_at(0, rows=32)), set_aside=True)
    assert capsys.readouterr().err.count("no checkpoint of such a model") == 2
    assert {path.name for path in two.iterdir()} == {"4", "8"}, "where none is good, none is moved"


def test_what_is_refused_is_in_no_save_s_way(copy, capsys):
    (copy / "8" / "state" / "manifest.ocdbt").write_bytes(b"")
    with ckpt.open_checkpoints(copy, 2) as saved:
        assert_is(ckpt.restore(saved, LIKE, CONFIG, set_aside=True), 4)
        for step in (6, 8):
            ckpt.save(saved, state_at(step), CONFIG, {"next_index": step})
    assert {path.name for path in copy.iterdir()} == {"6", "8", "8.refused"}
    assert_is(read(copy), 8)


def test_no_checkpoint_is_none(tmp_path):
    assert read(tmp_path) is None


def test_a_checkpoint_from_before_there_were_checksums_is_used(tmp_path, capsys):
    with ckpt.open_checkpoints(tmp_path, 1) as saved:
        saved.save(4, state_at(4)._asdict())
    found = read(tmp_path)
    assert found.data is None and int(found.state.step) == 4
    assert "was saved without checksums" in capsys.readouterr().err


def test_a_full_disk_loses_no_earlier_checkpoint(copy):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ckpt.open_checkpoints(copy, 1) as saved:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        try:
            with pytest.raises(
                UserError, match=r"step 12 could not be written .* the last good one is of step 8: make"
            ):
                ckpt.save(saved, state_at(12), CONFIG, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name for path in copy.iterdir()} == {"4", "8"}
    assert_is(read(copy), 8)


def test_a_reader_leaves_a_save_that_goes_on_alone(copy):
    going_on = copy / "12.orbax-checkpoint-tmp"
    going_on.mkdir()
    assert_is(read(copy), 8)
    assert going_on.exists()
    write(copy, 16)
    assert not going_on.exists()


# Saves or checks a state over all devices of one or several processes; arguments: number, count, port, verb, folder.
SPREAD = """
import sys
import jax
number, count, port, verb, folder = *map(int, sys.argv[1:4]), *sys.argv[4:]
if count > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
from jax.sharding import NamedSharding, PartitionSpec as P
from phase_jax.training import checkpoints as ckpt
from tests.training.test_checkpoints import CONFIG, LIKE, state_at
from pathlib import Path
import numpy as np
mesh = jax.make_mesh((2, jax.device_count() // 2), ("a", "b"))
spec = {2: P("b", "a"), 1: P("a"), 0: P()}
like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec[len(x.shape)])), LIKE
)
with ckpt.open_checkpoints(Path(folder), 3) as saved:
    if verb == "save":
        for step in (4, 8):
            value = jax.tree.map(np.asarray, state_at(step))
            state = jax.tree.map(
                lambda x, at: jax.make_array_from_callback(x.shape, at.sharding, x.__getitem__), value, like
            )
            ckpt.save(saved, state, CONFIG, {"next_index": step})
    else:
        found = ckpt.restore(saved, like, CONFIG, set_aside=True)
        step = found.data["next_index"]
        for x, y in zip(jax.tree.leaves(found.state), jax.tree.leaves(state_at(step)), strict=True):
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(shard.data, np.asarray(y)[shard.index])
        print("step", step)
"""


def spread(verb, folder, processes, devices):
    """Runs SPREAD in so many processes of so many devices each; what they print."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    port = 20_000 + os.getpid() % 20_000
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SPREAD, str(number), str(processes), str(port), verb, str(folder)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    results = [process.communicate(timeout=300) for process in running]
    assert all(process.returncode == 0 for process in running), results
    return results


@pytest.mark.slow
def test_a_checkpoint_of_eight_devices_is_checked_and_used_on_one_and_altered_is_refused(tmp_path, capsys):
    spread("save", tmp_path, 1, 8)
    assert_is(read(tmp_path), 8)
    for file in (tmp_path / "8" / "state").rglob("d/*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    assert_is(read(tmp_path), 4)


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_is_used_on_one_device_and_that_of_one_device_by_two_processes(tmp_path, capsys):
    spread("save", tmp_path / "two", 2, 2)
    assert_is(read(tmp_path / "two"), 8)
    write(tmp_path / "one", 4, 8)
    (tmp_path / "one" / "8" / "state" / "manifest.ocdbt").write_bytes(b"")
    assert all("step 4" in out for out, _ in spread("load", tmp_path / "one", 2, 2))
    assert {path.name for path in (tmp_path / "one").iterdir()} == {"4", "8.refused"}
