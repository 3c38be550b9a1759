"""Bytes that kernels move between memory and the chip, counted from the block specs of what is traced.

A block is moved when its index differs from the grid's step before, and clipped where it reaches beyond its array.
Grids with prefetched scalars cannot be counted: their blocks depend on values.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.extend.core
import numpy as np


class Traffic(NamedTuple):
    """Of one pallas_call: bytes read and written, and steps of its grid."""

    read: int
    written: int
    steps: int


def traffic(function: Callable, *arguments) -> list[Traffic]:
    """One for each pallas_call that `function` of the arguments (arrays or their shapes) makes, in order."""
    return [_count(eqn.params["grid_mapping"]) for eqn in _kernels(jax.make_jaxpr(function)(*arguments).jaxpr)]


def total_bytes(function: Callable, *arguments) -> int:
    """All that the kernels in `function` move."""
    return sum(t.read + t.written for t in traffic(function, *arguments))


def _kernels(jaxpr) -> Iterator:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        else:
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from _kernels(inner)


def _count(mapping) -> Traffic:
    if mapping.num_index_operands or mapping.num_dynamic_grid_bounds:
        raise NotImplementedError("the blocks of a grid with prefetched scalars or dynamic bounds depend on values")
    steps = np.indices(mapping.grid).reshape(len(mapping.grid), -1)
    moved = [_moved(block, steps) for block in mapping.block_mappings]
    return Traffic(sum(moved[: mapping.num_inputs]), sum(moved[mapping.num_inputs :]), math.prod(mapping.grid))


def _moved(block, steps: np.ndarray) -> int:
    """Bytes of one operand over the grid; `steps` [axes, n] in the order in which they run."""
    index_map = jax.vmap(jax.extend.core.jaxpr_as_fun(block.index_map_jaxpr))
    with jax.disable_jit():
        index = np.stack([np.broadcast_to(i, steps.shape[1:]) for i in index_map(*steps.astype(np.int32))])
    fresh = np.concatenate([[True], (index[:, 1:] != index[:, :-1]).any(axis=0)])
    index = index[:, fresh]
    size = np.array([getattr(d, "block_size", 1) if not isinstance(d, int) else d for d in block.block_shape])[:, None]
    shape = np.array(block.array_aval.shape)[:, None]
    return int(np.minimum(size, shape - index * size).prod(axis=0).sum()) * block.array_aval.dtype.itemsize
