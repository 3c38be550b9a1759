"""Runs as a process of its own with 8 host devices: two steps on every mesh, and what the loss sends between devices,
stored for test_sharding.

With "kernels" after the mesh, the Pallas forms, interpreted.

python -m tests.training.on_devices OUT.npz
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from experiments.hlo import program_cost
from pallas_kernels import request
from phase_jax.data.tokens import TokenBatch
from phase_jax.model import Transformer
from phase_jax.training.losses import next_token_loss
from phase_jax.training.optimizer import OptimizerConfig, make_optimizer
from phase_jax.training.sharding import batch_sharding, make_mesh, on_mesh, state_shardings
from phase_jax.training.step import TrainState, make_train_step, state_shapes
from tests.model.tiny import draw_params, tiny_config

MESHES = ("8x1x1", "2x4x1", "2x2x2")
WITH_KERNELS = ("8x1x1 kernels", "2x2x2 kernels")
BATCH, LENGTH, STEPS = 8, 18, 2


def batch() -> TokenBatch:
    tokens = np.random.default_rng(0).integers(0, 20, (BATCH, LENGTH + 1), np.int32)
    counted = np.random.default_rng(1).random((BATCH, LENGTH)) < 0.9
    return TokenBatch(tokens[:, :-1], tokens[:, 1:], counted)


def two_steps(name: str | None) -> dict[str, np.ndarray]:
    """Losses of both steps, and of the first the gradients (Adam's first moments, over 1 − b1)."""
    # Every kind of parameter, and two KV heads that `tensor` can split.
    config = tiny_config("kvc_w8s8_2kv", layers=1, query_heads=4, gate="vector", attention_block=8, remat=True)
    model, optimizer = Transformer(config), make_optimizer(OptimizerConfig(clip_norm=1e9), 10)
    shape, _, kernels = (name or "").partition(" ")
    mesh, data, params = None, jax.tree.map(jnp.asarray, batch()), draw_params(config)
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    if shape:
        mesh = make_mesh(shape)
        state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, state_shapes(model, optimizer, mesh)))
        data = jax.device_put(data, batch_sharding(mesh, BATCH))
    lies = jax.tree.map(lambda x: x.sharding, state)
    step = make_train_step(model, optimizer, z_weight=0.01, loss_chunk=8, mesh=mesh)
    found = {}
    for i in range(STEPS):
        with request("pallas", interpret=True) if kernels else request():
            state, metrics = step(state, data)
        assert jax.tree.map(lambda x: x.sharding, state) == lies, "a step moves nothing"
        found[f"loss {i}"] = np.asarray(metrics["loss"])
        if i == 0:
            moments = jax.tree_util.tree_leaves_with_path(state.opt_state[1][0].mu)
            found |= {jax.tree_util.keystr(path): np.asarray(leaf) / 0.1 for path, leaf in moments}
    assert step._cache_size() == 1
    return found


def sent(shape: str, chunk: int) -> float:
    """Bytes that a device sends to others for the loss's gradients."""
    mesh, length, width, vocabulary = make_mesh(shape), 32, 8, 64
    lies = state_shardings(mesh, {"embedding": jax.ShapeDtypeStruct((vocabulary, width), jnp.float32)})["embedding"]
    by_batch = batch_sharding(mesh, BATCH)

    def gradients(hidden, embedding, targets):
        def objective(*inputs):
            return next_token_loss(*inputs, targets, jnp.ones_like(targets), chunk=chunk).objective

        with on_mesh(mesh):
            return jax.grad(objective, (0, 1))(hidden, embedding)

    shapes = [((BATCH, length, width), jnp.float32), ((vocabulary, width), jnp.float32), ((BATCH, length), jnp.int32)]
    arguments = [
        jax.ShapeDtypeStruct(*shape, sharding=sharding)
        for shape, sharding in zip(shapes, (by_batch, lies, by_batch), strict=True)
    ]
    compiled = jax.jit(gradients, out_shardings=(by_batch, lies)).lower(*arguments).compile()
    return program_cost(compiled.as_text()).sent


if __name__ == "__main__":
    assert jax.device_count() == 8
    results = {
        f"{mesh} {name}": value for mesh in (None, *MESHES, *WITH_KERNELS) for name, value in two_steps(mesh).items()
    }
    of_chunks = {f"{shape} sent {chunk}": sent(shape, chunk) for shape in MESHES for chunk in (4, 32)}
    np.savez(sys.argv[1], **results, **of_chunks)
