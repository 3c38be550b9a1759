"""Runs that begin with a full-attention model's parameters: a run's own, or a Qwen3 folder's."""

import dataclasses

import jax
import numpy as np
import pytest

from phase_jax.errors import UserError
from phase_jax.model import Transformer, qwen3
from phase_jax.run import RunFolder
from phase_jax.training import loop
from tests.model.tiny import draw_params
from tests.runs import tiny_run

FULL = "full_attn_1kv"


@pytest.fixture
def source(tmp_path):
    """A Qwen3 folder of the tiny run's full-attention model."""
    config = tiny_run(FULL).model
    params = jax.tree.map(np.asarray, draw_params(config))
    qwen3.write(tmp_path / "qwen3", config, params, "float32")
    return tmp_path / "qwen3", config, params


@pytest.mark.parametrize("variant", ["kvc_w4s4_1kv", "kvc_w8s4", "kvc_w8s8_1kv_vector", "kvc_w8s8_1kv_kvshare"])
def test_entries_begin_as_the_mean_of_their_tokens(source, variant):
    folder, config, params = source
    wanted = dataclasses.replace(tiny_run(variant).model, norm_eps=config.norm_eps)
    given = loop.given_params(folder, wanted)
    model = Transformer(wanted)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), np.zeros((1, 32), np.int32)))["params"]
    assert jax.tree.map(lambda x: x.shape, given) == jax.tree.map(lambda x: x.shape, shapes)
    for branch, projection in (("compress_key", "key"), ("compress_value", "value")):
        if branch in given["layers"]["attention"]:
            payload = given["layers"]["attention"][branch]["payload"]
            for offset in range(payload.shape[1]):
                np.testing.assert_array_equal(payload[:, offset], params["layers"]["attention"][projection])
    # With maps alike and gates even, uniform averaging is the same model.
    uniform = jax.tree.map(np.asarray, given)
    for branch in ("compress_key", "compress_value"):
        for name in ("gate", "bias"):
            uniform["layers"]["attention"].get(branch, {}).pop(name, None)
    tokens = np.random.default_rng(0).integers(0, wanted.vocabulary, (2, 21))
    mean = Transformer(dataclasses.replace(wanted, gate="uniform"))
    np.testing.assert_allclose(
        jax.jit(model.apply)({"params": given}, tokens), jax.jit(mean.apply)({"params": uniform}, tokens), atol=1e-5
    )


@pytest.mark.slow
def test_a_run_trains_on_from_the_given_parameters(source, tmp_path):
    folder, _, params = source
    full = tiny_run(FULL, train={"steps": 1, "init_from": str(folder), "checkpoint_every": 1})
    still = dataclasses.replace(full.train.optimizer, learning_rate=0.0)
    full = dataclasses.replace(full, train=dataclasses.replace(full.train, optimizer=still))
    loop.train(full, RunFolder(tmp_path / "full"))
    kept = loop.load_params(full, RunFolder(tmp_path / "full"))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, kept), params)

    # And from a run's folder; once there is a checkpoint, where it began is no longer needed.
    run = tiny_run("kvc_w4s4_1kv", train={"init_from": str(tmp_path / "full")})
    assert loop.train(run, RunFolder(tmp_path / "compressed"))["resumed_from"] is None
    began = loop.given_params(tmp_path / "full", run.model)
    ended = loop.load_params(run, RunFolder(tmp_path / "compressed"))
    assert not np.allclose(began["embedding"], ended["embedding"])


def test_what_cannot_begin_a_run_is_refused_and_nothing_is_written(source, tmp_path):
    folder = source[0]
    wider = tiny_run("kvc_w4s4_1kv", model={"mlp_width": 32}).model
    with pytest.raises(UserError, match=r"differs in more than its memory.*mlp_width is 24, not 32"):
        loop.given_params(folder, wider)
    compressed = RunFolder(tmp_path / "other")
    compressed.claim(tiny_run("kvc_w8s4"))
    run = tiny_run("kvc_w4s4_1kv", train={"init_from": str(tmp_path / "nowhere")})
    with pytest.raises(UserError, match="holds no config"):
        loop.train(run, RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="holds no checkpoint yet"):
        loop.given_params(compressed.path, run.model)
