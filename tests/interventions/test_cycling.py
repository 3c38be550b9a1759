"""Gate cycling: what moves, what stays, and why a model with one payload map cannot tell."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phase_jax.compressors import compress
from phase_jax.errors import UserError
from phase_jax.geometry import Windows
from phase_jax.interventions.cycling import check_cycling, cycle_gates
from tests.model.tiny import draw_params, tiny_config

SHARED = tiny_config("kvc_w8s8_2kv", map_sharing="payload")


@pytest.mark.parametrize("delta", [-3, 1, 7])
def test_gates_and_biases_of_all_layers_and_branches_move_and_nothing_else_does(delta):
    params = draw_params(SHARED)
    cycled = cycle_gates(params, delta)
    moved = set()
    for path, (old, new) in _leaves(params, cycled):
        if np.array_equal(old, new):
            continue
        moved.add(path[-2:])
        for i in range(8):
            np.testing.assert_array_equal(new[:, i], old[:, (i - delta) % 8])
    assert moved == {(f"compress_{branch}", name) for branch in ("key", "value") for name in ("gate", "bias")}
    back = cycle_gates(cycled, -delta)
    assert all(np.array_equal(old, new) for _, (old, new) in _leaves(params, back))


def _leaves(first, second):
    pairs = jax.tree.map(lambda a, b: (np.asarray(a), np.asarray(b)), first, second)
    found = jax.tree_util.tree_flatten_with_path(pairs, is_leaf=lambda x: isinstance(x, tuple))[0]
    return [(tuple(key.key for key in path), pair) for path, pair in found]


@pytest.mark.parametrize("delta", [-2, 3])
def test_cycled_gates_over_cycled_tokens_make_the_same_entries_where_payload_maps_are_shared(delta):
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 24, SHARED.width)), jnp.float32)
    moved = jnp.roll(hidden.reshape(2, 3, 8, -1), delta, axis=2).reshape(hidden.shape)
    for config, same in ((SHARED, True), (tiny_config("kvc_w8s8_2kv"), False)):
        params = draw_params(config)
        branch, cycled = (
            jax.tree.map(lambda leaf: leaf[0], tree["layers"]["attention"]["compress_value"])
            for tree in (params, cycle_gates(params, delta))
        )
        entries, of_moved = compress(branch, hidden, Windows(8, 8), 1e-6), compress(cycled, moved, Windows(8, 8), 1e-6)
        assert np.allclose(entries, of_moved, atol=1e-5) == same


@pytest.mark.parametrize(
    ("variant", "deltas", "message"),
    [
        ("full_attn_1kv", [1], "full_attn_1kv has full attention"),
        ("kvc_w8s8_1kv_meanpool", [1], "has uniform gates"),
        ("kvc_w8s4", [1], "kvc_w8s4 has windows of 8 every 4: gates cycle only where W = S"),
        ("kvc_w4s4_1kv", [1, 4], "--delta 4 goes beyond the window: choose within -3:3"),
        ("kvc_w4s4_1kv", [-5], "--delta -5 goes beyond the window"),
    ],
)
def test_models_and_offsets_that_cannot_cycle_are_refused(variant, deltas, message):
    with pytest.raises(UserError, match=message):
        check_cycling(tiny_config(variant), deltas, variant)


def test_a_stride_that_the_residues_do_not_fold_to_is_refused():
    with pytest.raises(UserError, match="a stride of 5, which does not divide the 24 residues"):
        check_cycling(tiny_config("kvc_w4s4_1kv", window=5, stride=5), [1], "w5s5")
