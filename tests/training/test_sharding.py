"""On every mesh the numbers of one device; what cannot lie on a mesh is refused with one line."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from configs.family import model_config
from phase_jax.errors import UserError
from phase_jax.model import Transformer
from phase_jax.training.sharding import batch_sharding, make_mesh, state_shardings
from tests.training.on_devices import MESHES, WITH_KERNELS

ROOT = Path(__file__).parents[2]


def with_devices(count: int) -> dict:
    """The environment of a process that sees so many host devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("meshes") / "out.npz"
    command = [sys.executable, "-m", "tests.training.on_devices", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=with_devices(8), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(np.load(out))


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES + WITH_KERNELS)
def test_losses_and_gradients_are_those_of_one_device(found, shape):
    alone = {name: value for name, value in found.items() if name.startswith("None ")}
    assert len(alone) > 15
    for name, expected in alone.items():
        value = found[name.replace("None", shape)]
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max(), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
def test_devices_exchange_the_embeddings_gradient_once_however_many_chunks_there_are(found, shape):
    one_chunk, eight = found[f"{shape} sent 32"], found[f"{shape} sent 4"]
    assert one_chunk > 0 and eight < 1.2 * one_chunk


def abstract_mesh(*sizes, axes=("data", "fsdp", "tensor")):
    return jax.sharding.AbstractMesh(sizes, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))


def params_of(variant, scale="paper"):
    config = model_config(variant, scale)
    init = Transformer(config).init
    return jax.eval_shape(lambda: init(jax.random.key(0), jnp.zeros((1, 2 * (config.window or 1)), jnp.int32)))[
        "params"
    ]


@pytest.mark.parametrize(
    "variant", ["full_attn_8kv", "kvc_w8s8_1kv_vector", "kvc_w12s12_4kv", "kvc_w8s4_dsv4kernel_1kv_rope16"]
)
def test_every_large_parameter_is_split(variant):
    params = params_of(variant)
    shardings = state_shardings(abstract_mesh(16, 16, 1), params)
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
    ):
        split = "fsdp" in jax.tree.leaves(tuple(sharding.spec))
        assert split == (leaf.size > 28 * 1024), jax.tree_util.keystr(path)


def test_axes_lie_where_their_names_say():
    params = params_of("kvc_w8s8_8kv")
    spec = jax.tree.map(lambda s: s.spec, state_shardings(abstract_mesh(2, 4, 2), params))
    attention, mlp = spec["layers"]["attention"], spec["layers"]["mlp"]
    assert spec["embedding"] == P("tensor", "fsdp")
    assert attention["query"] == attention["key"] == P(None, "fsdp", "tensor")
    assert attention["out"] == P(None, "tensor", None, "fsdp")
    assert attention["compress_key"]["payload"] == P(None, None, "fsdp", "tensor")
    assert attention["compress_value"]["gate"] == P(None, None, "fsdp", "tensor")
    assert mlp["gate"] == mlp["up"] == P(None, "fsdp", "tensor") and mlp["down"] == P(None, "tensor", "fsdp")
    assert attention["q_norm"] == P()


def test_an_axis_that_does_not_divide_stays_whole():
    spec = jax.tree.map(lambda s: s.spec, state_shardings(abstract_mesh(1, 3, 2), params_of("full_attn_1kv", "lab")))
    assert spec["embedding"] == P(), "131 tokens, width 64"
    assert spec["layers"]["attention"]["key"] == P(), "one KV head"
    assert spec["layers"]["attention"]["query"] == P(None, None, "tensor")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("2x2", "write three numbers, DATAxFSDPxTENSOR, as in 1x1x1"),
        ("1xtwox1", "write three numbers"),
        ("0x1x1", "write three numbers"),
        ("2x4x1", "mesh 2x4x1 has 8 places and there are 1 devices"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(shape, message):
    with pytest.raises(UserError, match=message):
        make_mesh(shape, jax.devices()[:1])


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match=r"a batch of 12 does not divide .* as a multiple of 8, or another --mesh"):
        batch_sharding(abstract_mesh(2, 4, 1), 12)
