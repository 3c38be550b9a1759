"""On a mesh each device runs a kernel on its own part; values and gradients are those of plain JAX on one device."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.dispatch import in_parts, mesh_axes
from tests.training.test_sharding import ROOT, abstract_mesh, with_devices

PROGRAM = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from pallas_kernels import request
from pallas_kernels.decode import decode_attention
from pallas_kernels.joint_attention import joint_attention
from pallas_kernels.windowed_gating import windowed_gating
from phase_jax.geometry import ExactBranch, Windows
from phase_jax.training.sharding import make_mesh, on_mesh

B, T, N, H = 8, 21, 4, 8
windows, exact = Windows(8, 4, -4), ExactBranch(Windows(4, 2), "window", 6)
entries = exact.windows.count(T)
rng = np.random.default_rng(0)

def draw(*shapes):
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]

def attend(q, entry_k, entry_v, k, v, sink):
    return joint_attention(q, (entry_k, entry_v), (k, v), exact, sink)

def decode(q, entry_k, entry_v, k, v, positions, sink):
    return decode_attention(q, (entry_k, entry_v), (k, v), exact, positions, sink)

def both(function):
    def values_and_gradients(cotangent, *arguments):
        out, back = jax.vjp(function, *arguments)
        return out, back(cotangent)
    return values_and_gradients

one, two = (B, entries, 1, H), (B, entries, 2, H)
near = (B, exact.reach, 2, H)
calls = {
    # One KV head: whole on every device, whose queries are split.
    "gating": (both(lambda *a: windowed_gating(*a, windows)),
        draw((B, windows.count(T), 1, H), (B, T, 2, 1, H), (B, T, 2, 1, H), (8, 1, H))),
    "attention": (both(attend), draw((B, T, N, H), (B, T, N, H), one, one, (B, T, 1, H), (B, T, 1, H), (N,))),
    "decoding": (decode, [*draw((B, N, H), two, two, near, near), np.arange(B) + T - B, *draw((N,))]),
}
mesh = make_mesh("2x2x2")
for name, (function, arguments) in calls.items():
    want = jax.jit(function)(*arguments)
    def on_the_mesh(*arguments):
        with on_mesh(mesh):
            return function(*arguments)
    with request("pallas", interpret=True):
        everywhere = jax.device_put(arguments, NamedSharding(mesh, PartitionSpec()))
        got = jax.jit(on_the_mesh)(*everywhere)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5, err_msg=name)
"""


@pytest.mark.slow
def test_values_and_gradients_are_those_of_one_device():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=with_devices(8), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "shape"),
    [
        ((8, 2), "tensor", "tensor", (2, 5, 4, 16)),
        ((8, 1), "tensor", None, (2, 5, 4, 16)),
        ((6, 3), None, None, (2, 5, 6, 16)),
        ((3, 1), None, None, (2, 5, 3, 16)),
    ],
)
def test_heads_are_split_where_the_mesh_divides_them(heads, queries, keys, shape):
    q, k = (jnp.zeros((8, 5, n, 16)) for n in heads)
    mesh = abstract_mesh(2, 2, 2)
    with jax.sharding.use_abstract_mesh(mesh), mesh_axes(("data", "fsdp"), ("tensor",)):
        parts = in_parts("btnh btkh n -> btnh", q, (k, k), None)
    batch = ("data", "fsdp")
    assert parts.specs == (
        P(batch, None, queries and (queries,), None),
        P(batch, None, keys and (keys,), None),
        P(queries and (queries,)),
    )
    assert parts.out_spec == parts.specs[0]
    assert parts.shapes[0].shape == shape and parts.shapes[2] is None


def test_a_batch_that_the_mesh_does_not_divide_is_whole_everywhere():
    mesh = abstract_mesh(2, 3, axes=("data", "tensor"))
    with jax.sharding.use_abstract_mesh(mesh), mesh_axes(("data",), ("tensor",)):
        assert in_parts("bk -> bk", jnp.zeros((5, 3))).out_spec == P(None, ("tensor",))
    assert in_parts("bk -> bk", jnp.zeros((5, 3))).mesh is None
