"""How a run lies on its devices: a mesh of three axes, and the logical axes of every array laid onto it.

`data` splits the batch, `fsdp` the batch and the width of every matrix (ZeRO, Rajbhandari et al. 2020), `tensor` heads,
MLP and vocabulary (Megatron, Shoeybi et al. 2019). An axis that its part of the mesh does not divide stays whole.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.dispatch import mesh_axes
from phase_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")

# Logical axis -> axes of the mesh.
_MESH_AXES = {
    "batch": ("data", "fsdp"),
    "width": "fsdp",
    "vocabulary": "tensor",
    "heads": "tensor",
    "mlp": "tensor",
}

# Name of a parameter, with its owner's where that is not enough -> logical axes of its last dimensions; those before
# (layers) and parameters not named here (norms, biases) are whole everywhere.
_PARAMETERS = {
    "embedding": ("vocabulary", "width"),
    "unembedding": ("vocabulary", "width"),
    "query": ("width", "heads", None),
    "key": ("width", "heads", None),
    "value": ("width", "heads", None),
    "out": ("heads", None, "width"),
    "payload": ("width", "heads", None),
    "compress_key/gate": ("width", "heads", None),
    "compress_value/gate": ("width", "heads", None),
    "mlp/gate": ("width", "mlp"),
    "up": ("width", "mlp"),
    "down": ("mlp", "width"),
}


def make_mesh(shape: str | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `shape`, "DATAxFSDPxTENSOR", on the devices (default: all).

    By default up to 16 devices share one copy of the state, and more hold a copy in every 16.

    Raises UserError where the shape is none, or does not fit the devices.
    """
    devices = jax.devices() if devices is None else devices
    shared = math.gcd(len(devices), 16)
    shape = f"{len(devices) // shared}x{shared}x1" if shape is None else shape
    sizes = [int(size) if size.isdecimal() else 0 for size in shape.split("x")]
    if len(sizes) != len(AXES) or min(sizes) < 1:
        raise UserError(f"mesh '{shape}': write three numbers, DATAxFSDPxTENSOR, as in 1x{len(devices)}x1")
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh {shape} has {math.prod(sizes)} places and there are {len(devices)} devices: the product must be"
            " their number"
        )
    return jax.make_mesh(sizes, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES), devices=devices)


def _spec(mesh: Mesh, shape: Sequence[int], logical: Sequence[str | None]) -> PartitionSpec:
    """Where an array's last dimensions lie, by their logical axes."""

    def placed(size, name):
        axes = _MESH_AXES.get(name, ())
        parts = math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
        return axes if parts > 1 and size % parts == 0 else None

    logical = [None] * (len(shape) - len(logical)) + list(logical)
    spec = [placed(size, name) for size, name in zip(shape, logical, strict=True)]
    while spec and spec[-1] is None:  # as XLA writes it
        spec.pop()
    return PartitionSpec(*spec)


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """Shardings of a state (or of its shapes): Adam's moments lie as their parameters do."""

    def sharding(path, leaf):
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        logical = _PARAMETERS.get("/".join(names[-2:])) or _PARAMETERS.get("".join(names[-1:]), ())
        return NamedSharding(mesh, _spec(mesh, leaf.shape, logical))

    return jax.tree_util.tree_map_with_path(sharding, state)


def constrained(x: jax.Array, *logical: str | None) -> jax.Array:
    """Inside `on_mesh`, an array that lies as its logical axes say; elsewhere the array."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, _spec(mesh, x.shape, logical))


def batch_parts(mesh: Mesh | AbstractMesh) -> int:
    """Into how many parts a batch is split; one where the mesh is empty."""
    return mesh.shape.get("data", 1) * mesh.shape.get("fsdp", 1)


def batch_sharding(mesh: Mesh, rows: int) -> NamedSharding:
    """The sharding of arrays [rows, …]. Raises UserError where the mesh does not divide the rows."""
    parts = batch_parts(mesh)
    if rows % parts:
        raise UserError(
            f"a batch of {rows} does not divide over {mesh.shape['data']} x {mesh.shape['fsdp']} (data x fsdp) parts of"
            f" the mesh: choose --config.train.batch as a multiple of {parts}, or another --mesh"
        )
    return NamedSharding(mesh, PartitionSpec(_MESH_AXES["batch"]))


@functools.cache
def _own_parts(mesh: Mesh) -> list[int]:
    """Which parts of a batch this process's devices hold; where `tensor` spans processes, others hold them too."""
    parts = batch_parts(mesh)
    where = batch_sharding(mesh, parts).addressable_devices_indices_map((parts,))
    return sorted({index[0].start or 0 for index in where.values()})


def process_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """Which of a batch's rows this process has to read, in order. Raises UserError as `batch_sharding` does."""
    batch_sharding(mesh, rows)
    each = rows // batch_parts(mesh)
    return np.concatenate([np.arange(part * each, (part + 1) * each) for part in _own_parts(mesh)])


def place(batch: Any, mesh: Mesh) -> Any:
    """A batch on the mesh, of which every process gives the rows of `process_rows`; leaves without rows lie whole."""
    own = _own_parts(mesh)

    def placed(x):
        sharding = NamedSharding(mesh, PartitionSpec(_MESH_AXES["batch"] if x.ndim > 1 else None))
        if jax.process_count() == 1:
            return jax.device_put(x, sharding)
        x = np.asarray(x)
        if x.ndim < 2:
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
        each = len(x) // len(own)

        def rows(index):
            part = own.index((index[0].start or 0) // each)
            return x[part * each : (part + 1) * each]

        return jax.make_array_from_callback((each * batch_parts(mesh), *x.shape[1:]), sharding, rows)

    return jax.tree.map(placed, batch)


@contextmanager
def on_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Inside, while a function is traced, the model's logical axes and its kernels' mean this mesh; without one,
    nothing."""
    if mesh is None or mesh.size == 1:
        yield
        return
    in_kernels = mesh_axes(batch=_MESH_AXES["batch"], heads=(_MESH_AXES["heads"],))
    rules = nn.logical_axis_rules(tuple(_MESH_AXES.items()))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), rules, in_kernels:
        yield
