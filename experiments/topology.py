"""TPU topologies to compile for, on a machine that has none (extra `tpu`)."""

import importlib.util
import os

from phase_jax.errors import UserError

# What libtpu would ask a TPU machine about itself; and several processes may compile at once, as none holds a chip.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def prepare() -> None:
    """Sets up this process: JAX computes on the CPU, libtpu compiles. Raises UserError where there is none."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("libtpu is not installed: make extras EXTRAS=tpu brings it (Google's licence)")
    os.environ["JAX_PLATFORMS"] = "cpu"
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def topology_devices(name: str) -> list:
    """The chips of a topology such as v5e:16x16, for a mesh of a program that is compiled and not run.

    Raises UserError where libtpu is missing or knows no such topology.
    """
    prepare()
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:  # jaxlib raises errors of more than one type for what libtpu refuses
        said = str(error).splitlines()[0]
        raise UserError(
            f"topology '{name}' ({said}): write a generation and its chips, as in v5e:16x16, v5p:4x4x4 or v6e:8x8"
        ) from error
