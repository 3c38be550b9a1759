"""The paper's runs: what the paper fixes, in types it fixes, and everything else within reach of a flag."""

import jax
import jax.numpy as jnp
import pytest

from configs.family import FAMILY, default_seed, model_config
from experiments.options import run_config
from phase_jax.model import Transformer
from phase_jax.training.optimizer import make_optimizer
from phase_jax.training.step import init_state


@pytest.mark.parametrize("variant", FAMILY)
def test_every_id_makes_the_papers_run(variant):
    run = run_config([f"--config=configs/paper.py:{variant}"])
    assert (run.id, run.seed) == (variant, default_seed(variant))
    assert run.train.batch * run.data.length == 2_097_152 and run.train.steps == 47_518
    paper = model_config(variant, "paper")
    assert run.model == paper.__class__(**{**paper.__dict__, "attention_block": run.model.attention_block})
    assert run.model.dtype == "bfloat16" and run.model.remat and run.model.attention_block is not None


def test_parameters_and_moments_are_f32():
    run = run_config(["--config=configs/paper.py:kvc_w8s8_1kv_vector"])
    optimizer = make_optimizer(run.train.optimizer, run.train.steps)
    state = jax.eval_shape(lambda key: init_state(Transformer(run.model), optimizer, key), jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}


def test_flags_choose_the_schedule_the_z_loss_and_how_parameters_begin():
    flags = ("train.optimizer.schedule=wsd", "train.z_weight=1e-4", "model.initial_std=0.01", "train.loss_chunk=128")
    run = run_config(["--config=configs/paper.py:kvc_w4s4_1kv", *(f"--config.{flag}" for flag in flags)])
    assert run.train.optimizer.schedule == "wsd" and run.train.z_weight == 1e-4
    assert run.model.initial_std == 0.01 and run.train.loss_chunk == 128
