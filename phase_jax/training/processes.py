"""Several processes of one run: how they find each other, and agree."""

import os
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from phase_jax.errors import UserError


def connect(always: bool = False) -> None:
    """Joins the other processes of a run, before anything else asks JAX for devices.

    They are there where JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say so, where a launcher started
    several (srun, mpirun, TPU pods on Kubernetes), or where the caller knows it (`always`; Cloud TPU pods).
    Raises UserError for half of the three variables.
    """
    ours = {name: os.environ.get(name) for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")}
    address, *numbers = ours.values()
    if address is not None:
        if not all(number is not None and number.isdecimal() for number in numbers):
            raise UserError("with JAX_COORDINATOR_ADDRESS, set JAX_NUM_PROCESSES and JAX_PROCESS_ID to numbers too")
        jax.distributed.initialize(address, *map(int, numbers))
    elif always or _launched_together(os.environ):
        jax.distributed.initialize()


def _launched_together(environment: Mapping[str, str]) -> bool:
    """Whether a launcher says that this is one process of several."""
    counts = [environment.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")]
    return "," in environment.get("TPU_WORKER_HOSTNAMES", "") or any(count not in ("", "1") for count in counts)


def all_agree(yes: bool) -> bool:
    """Whether all processes say yes; each must ask."""
    return yes if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.array(yes)).all())


def any_process(yes: bool, asked: bool = True) -> bool:
    """Whether some process says yes; each must ask. Where there are several, only if `asked`, and else False."""
    if jax.process_count() == 1:
        return yes
    return asked and not all_agree(not yes)


def wait_for_all(where: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)
