"""A run is the same over several processes, and goes on from its checkpoints on another number of devices."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from phase_jax.errors import UserError
from phase_jax.run import RunFolder
from phase_jax.training import loop, processes
from tests.runs import tiny_run
from tests.training.test_sharding import with_devices

ROOT = Path(__file__).parents[2]
STEPS = 6
RUN = tiny_run(
    data={"curriculum": ((1.0, 4, 28),)},
    train={"steps": STEPS, "batch": 8, "checkpoint_every": 3, "first_layer_weight": 0.0, "validation_batches": 1},
)

CONFIG_FILE = """
from configs.family import as_config_dict
from tests.training.test_processes import RUN

def get_config(variant):
    return as_config_dict(RUN)
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Runs `phase-jax train` in a folder, on so many devices in each of so many processes."""
    config = tmp_path_factory.mktemp("config") / "tiny.py"
    config.write_text(CONFIG_FILE)

    def train(folder: Path, devices: int, mesh: str, processes: int = 1) -> RunFolder:
        command = [sys.executable, "-m", "experiments.cli", "train", f"--config={config}:tiny", f"--workdir={folder}"]
        environment = {**with_devices(devices), "JAX_NUM_PROCESSES": str(processes)}
        if processes > 1:
            environment["JAX_COORDINATOR_ADDRESS"] = f"localhost:{free_port()}"
        started = [
            subprocess.Popen(
                [*command, f"--mesh={mesh}"],
                cwd=ROOT,
                env={**environment, "JAX_PROCESS_ID": str(i)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i in range(processes)
        ]
        said = [process.communicate()[0] for process in started]
        assert all(process.returncode == 0 for process in started), "\n".join(said)
        return RunFolder(folder)

    return train


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def losses(folder: RunFolder) -> list[float]:
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows] + [json.loads(folder.training.read_text())["validation_loss"]]


def assert_same(one: RunFolder, other: RunFolder, tolerance: float):
    np.testing.assert_allclose(losses(one), losses(other), rtol=tolerance)
    ours, theirs = (loop.load_params(RUN, folder) for folder in (one, other))
    # Adam makes of a gradient near 0 a step of either sign.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=100 * tolerance), ours, theirs)


@pytest.fixture(scope="module")
def on_eight(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "eight", 8, "2x4x1")


def stopped_halfway(run: RunFolder, folder: Path) -> RunFolder:
    """A copy of a run as it was at its first checkpoint."""
    shutil.copytree(run.path, folder)
    copy = RunFolder(folder)
    copy.training.unlink()
    shutil.rmtree(copy.checkpoints / str(STEPS))
    return copy


@pytest.mark.slow
def test_two_processes_of_two_devices_are_one_of_four(train, tmp_path):
    assert_same(train(tmp_path / "two", 2, "2x2x1", processes=2), train(tmp_path / "one", 4, "2x2x1"), 1e-6)


@pytest.mark.slow
def test_a_checkpoint_of_eight_devices_goes_on_with_four(on_eight, train, tmp_path):
    stopped_halfway(on_eight, tmp_path / "four")
    four = train(tmp_path / "four", 4, "1x2x2")
    assert json.loads(four.training.read_text())["resumed_from"] == 3
    assert_same(four, on_eight, 1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_eight_devices_goes_on_with_one(on_eight, tmp_path):
    one = stopped_halfway(on_eight, tmp_path / "one")
    assert loop.train(RUN, one)["resumed_from"] == 3
    assert_same(one, on_eight, 1e-5)


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"SLURM_STEP_NUM_TASKS": "1", "TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"TPU_WORKER_HOSTNAMES": "t-0,t-1"}, True),
    ],
)
def test_a_launcher_of_several_processes_is_recognised(monkeypatch, environment, several):
    called = []
    monkeypatch.setattr(processes.os, "environ", environment)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: called.append(args))
    processes.connect()
    assert called == [()] * several
    processes.connect(always=True)
    assert called == [()] * (several + 1)


def test_half_of_an_address_is_refused(monkeypatch):
    monkeypatch.setattr(processes.os, "environ", {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2"})
    with pytest.raises(UserError, match="set JAX_NUM_PROCESSES and JAX_PROCESS_ID to numbers too"):
        processes.connect()
