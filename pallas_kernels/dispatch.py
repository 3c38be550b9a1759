"""Which form of a kernel runs: the one asked for, or the default of the platform, the kind of call and the dtype.

The defaults are rows of `defaults.json`, made by `phase-jax bench kernels --write-defaults`; where it has none, XLA.
On a mesh, whose devices XLA cannot share a Pallas call among, each device runs it on its own part (`in_parts`).
"""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec

Implementation = Literal["xla", "pallas"]

DEFAULTS = Path(__file__).with_name("defaults.json")


class Request(NamedTuple):
    """What is asked of calls that do not say it themselves; None leaves it to the defaults and to JAX."""

    implementation: Implementation | None = None
    platform: str | None = None
    interpret: bool = False
    kernels: tuple[str, ...] | None = None  # of which the implementation is asked; None for all


class Form(NamedTuple):
    """What runs: `name` is xla, tpu or gpu; `interpret` evaluates a Pallas form with JAX operations, on any machine."""

    name: str
    interpret: bool = False


_context = jax.make_user_context(Request())  # part of the key under which jit keeps what it traced
_mesh_axes = jax.make_user_context(((), ()))


def mesh_axes(batch: tuple[str, ...], heads: tuple[str, ...]):
    """Context in which these axes of the mesh in context split the batch and the heads of what kernels are given."""
    return _mesh_axes((batch, heads))


def request(
    implementation: Implementation | None = None,
    platform: str | None = None,
    interpret: bool = False,
    kernels: tuple[str, ...] | None = None,
):
    """Context in which kernels are traced otherwise than by default: every call whose own `implementation` is None.

    `platform` ("tpu", "gpu") is for compiling ahead of time for another machine; `interpret` runs the form of that
    platform (TPUs' where it is None) anywhere, slowly; `kernels` names those that are meant, by their folders, None for
    all. Raises ValueError for an unknown name.
    """
    if implementation not in (None, "xla", "pallas"):
        raise ValueError(f"implementation '{implementation}': choose xla or pallas, or None for the default")
    if platform not in (None, "cpu", "gpu", "tpu"):
        raise ValueError(f"platform '{platform}': choose cpu, gpu or tpu, or None for this machine's")
    return _context(Request(implementation, platform, interpret, kernels))


def choose(
    kernel: str,
    implementation: Implementation | None,
    kind: str,
    dtype,
    unsupported: Callable[[Form], str | None],
) -> Form:
    """The form that a call of `kernel` takes.

    `kind` names the class of calls that the defaults tell apart, `unsupported` says why a Pallas form cannot serve this
    call (None where it can). Raises NotImplementedError with that reason where Pallas was asked for by name.
    """
    if implementation not in (None, "xla", "pallas"):
        raise NotImplementedError(f"{kernel} has no implementation '{implementation}'; choose xla or pallas")
    asked, here = _context.value, platform()
    wanted = implementation or (asked.implementation if kernel in (asked.kernels or (kernel,)) else None)
    if (wanted or default(kernel, here, kind, dtype)) == "xla":
        return Form("xla")
    form = Form(here, asked.interpret)
    why_not = "CPUs run the reference; a Pallas form can only be interpreted there" if here == "cpu" else None
    why_not = why_not or unsupported(form)
    if why_not is None:
        return form
    if wanted:
        raise NotImplementedError(f"{kernel} on {here}: {why_not}")
    return Form("xla")


def platform() -> str:
    """cpu, gpu or tpu: the one asked for, or the one that computes here."""
    asked, device = _context.value, jax.config.jax_default_device
    name = asked.platform or (
        "tpu" if asked.interpret else getattr(device, "platform", device) or jax.default_backend()
    )
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


def default(kernel: str, platform: str, kind: str, dtype) -> Implementation:
    """The implementation that `defaults.json` names; xla where it names none."""
    return _defaults().get((kernel, platform, kind, jax.numpy.dtype(dtype).name), "xla")


@functools.cache
def _defaults() -> dict[tuple[str, str, str, str], Implementation]:
    rows = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    return {(row["kernel"], row["platform"], row["kind"], row["dtype"]): row["default"] for row in rows}


class Parts(NamedTuple):
    """A call's arguments as the devices of a mesh share them."""

    arguments: tuple  # pytrees of arrays
    shapes: tuple  # of one device's part of them
    mesh: jax.sharding.AbstractMesh | None = None  # None where every device that computes has all of them
    specs: tuple[PartitionSpec, ...] = ()
    out_spec: PartitionSpec | None = None

    def run(self, function: Callable[..., jax.Array]) -> jax.Array:
        """`function` of the arguments, each device's of its own part. What is whole on all gets all their gradients."""
        if self.mesh is not None:
            # Pallas calls do not say over which axes their results vary, so that it cannot be checked.
            function = jax.shard_map(
                function, mesh=self.mesh, in_specs=self.specs, out_specs=self.out_spec, check_vma=False
            )
        return function(*self.arguments)


def in_parts(equation: str, *arguments: Any) -> Parts:
    """How a kernel's arguments lie on the mesh in context, if there is one.

    The equation names axes as in einsum, say "btnh btkh btkh n -> btnh", one term for all arrays of an argument: `b` is
    the batch, `k` are KV heads and `n` query heads. An axis that the mesh does not divide stays whole, and with KV
    heads, unless there is one for all, the queries'.
    """
    mesh, (batch, heads) = jax.sharding.get_abstract_mesh(), _mesh_axes.value
    if not (batch or heads) or mesh.empty or not mesh.are_all_axes_auto:
        return Parts(arguments, arguments)
    *terms, out = equation.replace("->", "").split()
    sizes = {
        letter: size
        for term, argument in zip(terms, arguments, strict=True)
        for leaf in jax.tree.leaves(argument)
        for letter, size in zip(term, leaf.shape, strict=True)
    }
    parts = {axes: math.prod(mesh.shape[axis] for axis in axes) for axes in (batch, heads)}
    split = {
        letter: axes
        for letter, axes in (("b", batch), ("k", heads), ("n", heads))
        if letter in sizes and sizes[letter] % parts[axes] == 0
    }
    if "k" not in split and sizes["k"] > 1:
        split.pop("n", None)

    def of_one(term, array):
        whole = zip(term, array.shape, strict=True)
        shape = [size // parts[split[letter]] if letter in split else size for letter, size in whole]
        return jax.ShapeDtypeStruct(shape, array.dtype)

    shapes = (
        jax.tree.map(functools.partial(of_one, term), argument) for term, argument in zip(terms, arguments, strict=True)
    )
    specs = [PartitionSpec(*map(split.get, term)) for term in (*terms, out)]
    return Parts(arguments, tuple(shapes), mesh, tuple(specs[:-1]), specs[-1])
