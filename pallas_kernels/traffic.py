"""Bytes that kernels move between memory and the chip, and FLOPs of their matrix products, counted from what is traced.

A block is moved when its index differs from the grid's step before, and clipped where it reaches beyond its array.
Where prefetched scalars steer the blocks, their values are computed from what the function is given or holds. Of a
conditional in a kernel the branch that a step takes counts, the dearest where that depends on what the kernel computes.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_INLINED = {"jit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call", "shard_map"}
_MOST = 2**24  # elements of an array that is computed on the way to prefetched scalars


class Traffic(NamedTuple):
    """Of one pallas_call, each of the times that it runs: bytes read and written, steps of its grid and FLOPs."""

    read: int
    written: int
    steps: int
    flops: int
    runs: int = 1


def traffic(function: Callable, *arguments) -> list[Traffic]:
    """One for each pallas_call that `function` of the arguments (arrays or their shapes) makes, in order.

    Raises NotImplementedError where blocks depend on values that are not given, or how often a kernel runs does.
    """
    given = [None if isinstance(x, jax.ShapeDtypeStruct) else x for x in jax.tree.leaves(arguments)]
    return traffic_of(jax.make_jaxpr(function)(*arguments), given)


def traffic_of(traced: ClosedJaxpr, given: Sequence[Any] | None = None) -> list[Traffic]:
    """`traffic` of what is traced already, of one device where there is a mesh; `given` are its inputs, None where
    they are unknown."""
    found, jaxpr = [], traced.jaxpr
    _follow(jaxpr, [*traced.consts, *(given or [None] * len(jaxpr.invars))], 1, found)
    return found


def total_bytes(calls: Sequence[Traffic]) -> int:
    """All that they move."""
    return sum(call.runs * (call.read + call.written) for call in calls)


def total_flops(calls: Sequence[Traffic]) -> int:
    """Of all their matrix products."""
    return sum(call.runs * call.flops for call in calls)


def _follow(jaxpr: Jaxpr, values: Sequence[Any], runs: int, found: list[Traffic]) -> list[Any]:
    """Appends what a jaxpr's kernels move; returns its outputs, those that are small and of integers, None for others.

    `values` are its constants and inputs, None where unknown.
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))

    def value(atom):
        return atom.val if isinstance(atom, Literal) else known.get(atom)

    for eqn in jaxpr.eqns:
        inputs, inner = [value(atom) for atom in eqn.invars], list(_inner(eqn.params))
        outputs = [None] * len(eqn.outvars)
        if eqn.primitive.name == "pallas_call":
            found.append(_count(eqn.params["grid_mapping"], eqn.params["jaxpr"], inputs)._replace(runs=runs))
        elif eqn.primitive.name in ("mpmd_map", "core_map"):
            raise NotImplementedError("a kernel that fetches its blocks itself, as those for GPUs do")
        elif eqn.primitive.name == "scan":
            ((body, constants),) = inner
            same = inputs[: eqn.params["num_consts"]]
            varying = [None] * (len(body.invars) - len(same))
            _follow(body, [*constants, *same, *varying], runs * eqn.params["length"], found)
        elif eqn.primitive.name in _INLINED:
            ((body, constants),) = inner
            outputs = _follow(body, [*constants, *inputs], runs, found)
        elif inner:
            before = len(found)
            for body, constants in inner:
                _follow(body, [*constants, *[None] * len(body.invars)], runs, found)
            if len(found) > before:
                raise NotImplementedError(f"a kernel in a {eqn.primitive.name}: how often it runs depends on values")
        elif all(x is not None for x in inputs) and all(_small(variable.aval) for variable in eqn.outvars):
            made = eqn.primitive.bind(*inputs, **eqn.params)
            outputs = made if eqn.primitive.multiple_results else [made]
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _inner(params: dict) -> Iterator[tuple[Jaxpr, Sequence[Any]]]:
    """The jaxprs that an equation holds, with their constants."""
    for parameter in params.values():
        for one in parameter if isinstance(parameter, tuple) else (parameter,):
            if isinstance(one, ClosedJaxpr):
                yield one.jaxpr, one.consts
            elif isinstance(one, Jaxpr):
                yield one, ()


def _small(aval) -> bool:
    return aval.size <= _MOST and not jnp.issubdtype(aval.dtype, jnp.inexact)


def _flops(jaxpr: Jaxpr, values: Sequence[Any], steps: np.ndarray) -> np.ndarray:
    """Of the matrix products of each step of a grid, [n]; `steps` [axes, n] are the program's ids.

    `values` are the body's inputs where they are known: an array behind a reference, or a number for each step [n].
    """
    known = dict(zip(jaxpr.invars, values, strict=True))
    each = np.zeros(steps.shape[1], np.int32)
    total = each.astype(np.int64)

    def value(atom):
        return atom.val if isinstance(atom, Literal) else known.get(atom)

    for eqn in jaxpr.eqns:
        inputs, inner = [value(atom) for atom in eqn.invars], list(_inner(eqn.params))
        (out,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * out.aval.size * math.prod(left[axis] for axis in contracted)
        elif eqn.primitive.name == "program_id":
            known[out] = steps[eqn.params["axis"]]
        elif eqn.primitive.name == "get" and out.aval.shape == () and all(x is not None for x in inputs):
            known[out] = inputs[0][tuple(each + i for i in inputs[1:])]
        elif eqn.primitive.name == "cond":
            taken, *rest = inputs
            of_branches = np.stack([_flops(body, rest, steps) for body, _ in inner])
            total += of_branches.max(axis=0) if taken is None else of_branches[each + taken, np.arange(each.size)]
        elif inner:
            of_inner = sum(_flops(body, [None] * len(body.invars), steps) for body, _ in inner)
            if eqn.primitive.name == "while" and of_inner.any():
                raise NotImplementedError("products in a loop in a kernel: how often it runs depends on values")
            total += of_inner * eqn.params.get("length", 1)
        elif inputs and out is not None and out.aval.shape == () and all(x is not None for x in inputs):
            known[out] = np.asarray(
                jax.vmap(functools.partial(eqn.primitive.bind, **eqn.params))(*(each + x for x in inputs))
            )
    return total


def _count(mapping, kernel: Jaxpr, inputs: Sequence[Any]) -> Traffic:
    if mapping.num_dynamic_grid_bounds:
        raise NotImplementedError("the bounds of a grid depend on values")
    scalars = inputs[: mapping.num_index_operands]
    if any(x is None for x in scalars):
        raise NotImplementedError("the blocks of a grid depend on values, of prefetched scalars, that are not given")
    steps = np.indices(mapping.grid, np.int32).reshape(len(mapping.grid), -1)
    moved = [_moved(block, steps, scalars) for block in mapping.block_mappings]
    read = sum(moved[: mapping.num_inputs]) + sum(np.asarray(x).nbytes for x in scalars)
    prefetched = [np.asarray(x) for x in scalars]
    own = np.delete(steps, mapping.vmapped_dims, axis=0)  # kernels do not know of axes that vmap adds
    flops = _flops(kernel, prefetched + [None] * (len(kernel.invars) - len(scalars)), own)
    return Traffic(read, sum(moved[mapping.num_inputs :]), steps.shape[1], int(flops.sum()))


def _moved(block, steps: np.ndarray, scalars: Sequence[Any]) -> int:
    """Bytes of one operand over the grid; `steps` [axes, n] in the order in which they run."""
    first_of = jax.vmap(lambda *step: block.compute_start_indices_interpret(step, *scalars))
    with jax.disable_jit():
        first = np.stack([np.broadcast_to(i, steps.shape[1:]) for i in first_of(*steps)])
    fresh = np.concatenate([[True], (first[:, 1:] != first[:, :-1]).any(axis=0)])
    first = first[:, fresh]
    size = np.array([getattr(d, "block_size", 1) if not isinstance(d, int) else d for d in block.block_shape])[:, None]
    shape = np.array(block.array_aval.shape)[:, None]
    return int(np.minimum(size, shape - first).prod(axis=0).sum()) * block.array_aval.dtype.itemsize
