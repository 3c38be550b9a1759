"""What weight decay and the schedule do, seen from the updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phase_jax.errors import UserError
from phase_jax.model import Transformer
from phase_jax.training.optimizer import OptimizerConfig, learning_rate, make_optimizer
from tests.model.tiny import tiny_config

SPARED = {"attention_norm", "mlp_norm", "final_norm", "q_norm", "k_norm", "norm", "bias"}
PULLED = {"embedding", "query", "key", "value", "out", "payload", "gate", "up", "down"}


def test_weight_decay_spares_norms_and_gate_biases_and_nothing_else():
    config = tiny_config("kvc_w8s8_1kv_vector", post_norm=True)
    init = Transformer(config).init
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"])
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 2.0), shapes)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5), 10)
    # Without a gradient, all that Adam would move is what decay pulls on: by rate · decay · value.
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    named = [(path[-1].key, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(updates)]
    assert {name for name, _ in named} == SPARED | PULLED
    for name, leaf in named:
        np.testing.assert_allclose(leaf, 0.0 if name in SPARED else -0.1 * 0.5 * 2.0, rtol=1e-6, err_msg=name)


def test_the_learning_rate_rises_to_its_peak_and_falls_by_half_a_cosine():
    schedule = learning_rate(OptimizerConfig(learning_rate=2.0, warmup_steps=10, final_share=0.1), 110)
    rates = [float(schedule(step)) for step in (0, 5, 10, 60, 110)]
    assert rates == pytest.approx([0.0, 1.0, 2.0, (2.0 + 0.2) / 2, 0.2], rel=1e-5)


def test_wsd_stays_at_its_peak_and_falls_in_a_straight_line_at_the_end():
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=10, schedule="wsd", final_share=0.1, decay_share=0.25)
    rates = [float(learning_rate(config, 200)(step)) for step in (0, 5, 10, 80, 149, 150, 175, 200)]
    assert rates == pytest.approx([0.0, 1.0, 2.0, 2.0, 2.0, 2.0, (2.0 + 0.2) / 2, 0.2], rel=1e-5)
    short = learning_rate(config, 4)  # warm-up takes half, decay a step
    assert [float(short(step)) for step in range(5)] == pytest.approx([0.0, 1.0, 2.0, 2.0, 0.2])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("schedule", "linear", "schedule is 'linear': choose cosine or wsd"), ("decay_share", 0.0, "decay_share is 0.0")],
)
def test_a_schedule_that_does_not_exist_is_refused(field, value, message):
    with pytest.raises(UserError, match=message):
        OptimizerConfig(**{field: value})


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_a_short_run_still_learns_and_ends_at_the_final_share(steps):
    rates = [float(learning_rate(OptimizerConfig(), steps)(step)) for step in range(steps + 1)]
    assert max(rates[:steps]) > 0 or steps == 2
    assert np.isfinite(rates).all() and rates[-1] == pytest.approx(0.1 * 3e-3, rel=1e-4)


def test_gradients_are_clipped_to_the_norm():
    """Adam's first step is the sign of the gradient, but its second moment shows what came in."""
    optimizer = make_optimizer(OptimizerConfig(clip_norm=1.0, b2=0.98), 10)
    params = {"up": jnp.zeros(4)}
    _, state = optimizer.update({"up": jnp.array([30.0, 40.0, 0.0, 0.0])}, optimizer.init(params), params)
    adam = next(leaf for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState)))
    while not isinstance(adam, optax.ScaleByAdamState):
        adam = adam[0]
    np.testing.assert_allclose(adam.nu["up"], 0.02 * np.array([0.36, 0.64, 0, 0]), rtol=1e-4)
