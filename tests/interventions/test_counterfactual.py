"""Counterfactual models against one forward pass each, with gates made by loops."""

import jax
import numpy as np
import pytest

from phase_jax.data.prompts import phase_prompts
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.geometry import Windows
from phase_jax.interventions.counterfactual import (
    CAUSES,
    CONDITIONS,
    counterfactual_report,
    head_cycle,
    mean_gates,
    measure,
)
from phase_jax.model import Intervention, Transformer
from tests.model.tiny import draw_params, tiny_config

WORDS = Vocabulary(8)
SIZES = {"length": 24, "records": 4, "demonstrations": 1, "residues": 6}
KINDS = {
    "boundary, two KV heads": {"variant": "kvc_w8s8_2kv", "window": 3, "stride": 3, "exact_width": 4},
    "overlap, tied, half-empty": {
        "variant": "kvc_w8s4_dsv4kernel_1kv_rope16",
        "window": 4,
        "stride": 2,
        "origin": -2,
        "exact_width": 4,
    },
}


def loop_gates(kind, own, mean, present, cycle):
    """One branch's weights [L, B, J, W, K, g] of a kind, a window at a time."""
    layers, batch, count, _, heads, channels = own.shape
    made = np.empty_like(own)
    for layer, b, j, k, g in np.ndindex(layers, batch, count, heads, channels):
        weights = own[layer, b, j, :, k, g]
        if kind == "frozen":
            weights = np.where(present[j], mean[layer, :, k, g], 0)
        elif kind == "reweighted":
            weights = weights / mean[layer, :, k, g]
        elif kind == "uniform":
            weights = np.where(present[j], 1.0, 0)
        elif kind == "shuffled":
            other_layer, other_head = divmod(cycle[layer * heads + k], heads)
            weights = own[other_layer, b, j, :, other_head, g]
        made[layer, b, j, :, k, g] = weights / weights.sum()
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_every_condition_equals_one_forward_pass(kind):
    config = tiny_config(vocabulary=WORDS.size, **KINDS[kind])
    model, params, windows = Transformer(config), draw_params(config), config.windows
    prompts = phase_prompts(WORDS, "prefix", 2, seed=0, **SIZES)
    means = mean_gates(model, params, phase_prompts(WORDS, "prefix", 2, seed=9, **SIZES))
    for mean in means.values():
        np.testing.assert_allclose(mean.sum(axis=1), 1, rtol=1e-4)
    scores = measure(model, params, prompts, WORDS, means, "test")

    tokens = prompts.tokens.reshape(-1, SIZES["length"])
    _, left = jax.jit(lambda tokens: model.apply({"params": params}, tokens, mutable="intermediates"))(tokens)
    attention = left["intermediates"]["layers"]["attention"]
    present = windows.starts(SIZES["length"])[:, None] + np.arange(windows.width) >= 0
    cycle = head_cycle(config.layers, config.kv_heads)
    target = prompts.target_position.reshape(-1)
    also = np.zeros((config.layers, *tokens.shape), bool)
    for row, position in enumerate(target):
        holding = [j for j, start in enumerate(windows.starts(60)) if start <= position < start + windows.width]
        if not any(position + 1 < windows.start(j) + windows.width for j in holding):
            also[:, row, position + 1] = True
    assert also.any() == (windows.width == windows.stride)

    @jax.jit
    def passed(change, params):
        return jax.nn.log_softmax(model.apply({"params": params}, tokens, last_only=True, change=change))

    found = {}
    for name, condition in CONDITIONS.items():
        gates = [None, None]
        for place, branch in enumerate(("compress_key", "compress_value")):
            if branch in attention:
                own, mean = np.asarray(attention[branch]["gates"][0]), means[branch.removeprefix("compress_")]
                gates[place] = loop_gates(condition.gates, own, mean, present, cycle)
        changed = jax.tree.map(np.array, params)
        if condition.payload:
            for branch in ("compress_key", "compress_value"):
                if branch in attention:
                    maps = changed["layers"]["attention"][branch]["payload"]
                    maps[:] = maps.mean(axis=1, keepdims=True)
        logits = passed(Intervention(None, *gates, also & condition.boundary), changed)
        answer = np.repeat(prompts.answer, SIZES["residues"])
        found[name] = -np.asarray(logits)[np.arange(len(tokens)), answer].reshape(prompts.target_position.shape)
    for place, (name, nll) in enumerate(found.items()):
        np.testing.assert_allclose(scores["nll"][:, place], nll, rtol=1e-4, atol=1e-4, err_msg=name)
        if name not in ("clean", "boundary"):
            assert np.abs(nll - found["clean"]).max() > 1e-3, f"{name} changes nothing: nothing was tested"


def test_heads_are_exchanged_with_others():
    for layers, heads in ((2, 1), (1, 2), (3, 4)):
        cycle = head_cycle(layers, heads)
        assert sorted(cycle) == list(range(layers * heads)) and (cycle != np.arange(layers * heads)).all()
    assert head_cycle(1, 1).tolist() == [0]


def test_the_table_adds_up():
    rng = np.random.default_rng(0)
    accuracy = rng.random((len(CONDITIONS), 1, 8))
    correct = np.moveaxis(rng.random((len(CONDITIONS), 60, 8)) < accuracy, 0, 1)
    scores = {"correct": correct, "nll": 1.0 - correct}
    report = counterfactual_report(scores, tiny_config("kvc_w4s4_1kv"))
    gaps = {name: numbers["gap"] for name, numbers in report["conditions"].items()}
    total = sum(report["in_order"][cause]["gap"] for cause in CAUSES) + report["remains"]["gap"]
    assert total == pytest.approx(gaps["clean"])
    for cause in CAUSES:
        assert report["alone"][cause]["gap"] == pytest.approx(gaps["clean"] - gaps[cause])
        low, high = report["alone"][cause]["gap_interval"]
        assert low <= report["alone"][cause]["gap"] <= high
    overlapping = counterfactual_report(scores, tiny_config("kvc_w8s4", layers=1))
    assert overlapping["alone"]["boundary"] is None and overlapping["in_order"]["boundary"] is None
    assert overlapping["alone"]["shuffled"] is None and report["alone"]["shuffled"] is not None


def test_the_boundary_is_where_no_window_holds_both():
    assert [bool(Windows(4, 4).parted(t)) for t in range(8)] == [False, False, False, True] * 2
    assert [bool(Windows(4, 4, -1).parted(t)) for t in range(4)] == [False, False, True, False]
    assert not any(Windows(5, 4).parted(t) for t in range(8))
