"""Gate statistics against a loop in float64 over windows, heads and channels."""

import itertools

import numpy as np
import pytest
from scipy import special

from phase_jax.data.prompts import phase_prompts
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.errors import UserError
from phase_jax.interventions.gates import aligned, check_gates, gates_report, measure_gates, record_windows
from phase_jax.model import Transformer
from tests.model.tiny import draw_params, tiny_config

VOCABULARY = Vocabulary(8)


def prompts():
    return phase_prompts(VOCABULARY, "insequence", 1, length=80, records=4, demonstrations=2, seed=5)


def windows_with_records(windows, tokens):
    """Of one prompt, by its ids: [J]."""
    closing = list(tokens).index(VOCABULARY.query_mark)
    words = [t for t in range(closing) if tokens[t] >= min(VOCABULARY.first_animal, VOCABULARY.first_name)]
    return [
        start >= 0 and any(start <= t < start + windows.width for t in words) for start in windows.starts(len(tokens))
    ]


def slow_gates(config, branch, inputs, windows):
    """α of one layer and branch [J, W, K, g], from the layer's attention inputs [T, D]."""
    maps, bias = branch["gate"], branch.get("bias")
    which = {"offset": lambda i: i, "part": lambda i: i // windows.stride, "payload": lambda i: i}[config.map_sharing]
    result = []
    for start in windows.starts(len(inputs)):
        logits = np.full((windows.width, config.kv_heads, maps.shape[-1]), -np.inf)
        for i in range(windows.width):
            if start + i >= 0:
                logits[i] = np.einsum("d,dkg->kg", inputs[start + i], maps[which(i)]) + (0 if bias is None else bias[i])
        result.append(special.softmax(logits, axis=0))
    return np.array(result)


CASES = {
    "kvc_w8s8_2kv": {},
    "kvc_w8s6": {"map_sharing": "payload"},
    "kvc_w8s4_dsv4kernel_1kv_rope16": {"head_dim": 32, "rope_dims": 16},
}


@pytest.mark.parametrize("variant", CASES)
def test_every_number_equals_the_loop(variant):
    config = tiny_config(variant, vocabulary=VOCABULARY.size, **CASES[variant])
    model, params, some = Transformer(config), draw_params(config), prompts()
    found = measure_gates(model, params, some)
    windows = config.windows

    flat = some.tokens.reshape(-1, some.tokens.shape[-1])
    _, seen = model.apply({"params": params}, flat, method="hidden_states", mutable="intermediates")
    (hidden,) = seen["intermediates"]["layers"]["hidden"]
    layers = params["layers"]
    counted = np.array([windows_with_records(windows, tokens) for tokens in flat])
    np.testing.assert_array_equal(record_windows(windows, some).reshape(counted.shape), counted)
    assert found["windows"] == counted.sum() and 0 < counted.mean() < 1
    for branch, layer in itertools.product(("key", "value"), range(config.layers)):
        if branch == "value" and config.tied_kv:
            assert "value" not in found
            continue
        own = {name: np.float64(leaf[layer]) for name, leaf in layers["attention"][f"compress_{branch}"].items()}
        x = np.float64(hidden[layer])
        normed = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_eps)
        normed = normed * np.float64(layers["attention_norm"][layer])
        gates = [slow_gates(config, own, tokens, windows)[held] for tokens, held in zip(normed, counted, strict=True)]
        gates = np.concatenate(gates)  # [windows, W, K, g]
        for head in range(config.kv_heads):
            alpha = gates[:, :, head]
            mean = alpha.mean(axis=0)
            static = np.mean([np.exp(special.entr(channel).sum()) for channel in mean.T])
            per_window = np.mean([np.exp(special.entr(a[:, c]).sum()) for a in alpha for c in range(alpha.shape[-1])])
            result = {name: values[layer, head] for name, values in found[branch].items()}
            np.testing.assert_allclose(result["mass"], mean.mean(axis=1), rtol=1e-4)
            assert result["static"] == pytest.approx(static, rel=1e-4)
            assert result["per_window"] == pytest.approx(per_window, rel=1e-4)
            assert 1 <= result["per_window"] <= result["static"] <= config.window + 1e-6, "the entropy is concave"
            assert result["peak"] == mean.mean(axis=1).argmax()
            share = np.bincount(windows.phase(windows.origin + np.arange(windows.width)), mean.mean(axis=1))
            uniform = np.bincount(windows.phase(windows.origin + np.arange(windows.width))) / windows.width
            np.testing.assert_allclose(result["profile"], share / uniform, rtol=1e-4)


def test_the_report_has_every_head_and_the_path_of_every_checkpoint():
    key = {
        "mass": np.array([[[0.7, 0.1, 0.1, 0.1]], [[0.1, 0.2, 0.3, 0.4]]]),
        "static": np.array([[2.0], [3.7]]),
        "per_window": np.array([[1.5], [3.0]]),
        "peak": np.array([[0], [3]]),
    }
    value = {**key, "peak": np.array([[1], [2]])}
    config = tiny_config("kvc_w4s4_1kv")
    earlier = {"windows": 9, "key": {**key, "static": key["static"] + 0.1}, "value": value}
    report = gates_report(config, [earlier, {"windows": 9, "key": key, "value": value}])
    assert [(head["layer"], head["head"]) for head in report["heads"]] == [(0, 0), (1, 0)]
    assert [head["peak_difference"] for head in report["heads"]] == [1, -1]
    assert [head["best_shift"] for head in report["heads"]] == [0, 0]
    assert [head["concentrated"] for head in report["heads"]] == [True, False], "below 0.8 · 4 = 3.2"
    assert report["path"]["static"] == [[[2.1], [pytest.approx(3.8)]], [[2.0], [3.7]]]
    tied = gates_report(config, [{"windows": 9, "key": key}])
    assert tied["heads"][0]["value"] is None and tied["heads"][0]["peak_difference"] is None


@pytest.mark.parametrize(
    ("variant", "message"),
    [("full_attn_1kv", "full attention"), ("kvc_w8s8_1kv_meanpool", "uniform gates")],
)
def test_models_without_learned_gates_are_refused(variant, message):
    with pytest.raises(UserError, match=f"{variant} has {message}"):
        check_gates(tiny_config(variant), variant)


def test_alignment_joins_heads_to_their_knockouts_and_leaves_the_boundary_out():
    head = {"layer": 1, "head": 0, "key": {"profile": [0.1, 2.0, 1.0, 0.9]}, "alignment": None}
    report = {"width": 4, "stride": 4, "heads": [head, {**head, "layer": 2}]}
    losses = {"name": "1.0", "kind": "head", "loss_by_phase": [0.0, 0.3, 0.1, 0.9], "p_relative_holm": 0.01}
    losses["mean_interval"] = [-0.3, -0.2]
    others = [{**losses, "kind": "set"}, {**losses, "name": "layer 1", "kind": "layer"}]
    first, second = aligned(report, {"knockouts": [losses, *others]})["heads"]
    assert second["alignment"] is None
    assert first["alignment"] == {
        "loss_by_phase": [0.0, 0.3, 0.1, 0.9],
        "specialised": True,
        "correlation": pytest.approx(1),
        "p_value": pytest.approx(1 / 3),
    }
    (overlapping, _) = aligned({**report, "width": 8}, {"knockouts": [losses]})["heads"]
    assert overlapping["alignment"]["correlation"] == pytest.approx(0.4)
    for change in ({"p_relative_holm": 0.05}, {"p_relative_holm": None}, {"mean_interval": [-0.3, 0.0]}):
        (head, _) = aligned(report, {"knockouts": [losses | change]})["heads"]
        assert not head["alignment"]["specialised"]
