"""The 27 models of SPEC §3, against its table written out by hand."""

import dataclasses
import json

import pytest

from configs import lab, lab_long
from configs.family import FAMILY, default_seed, model_config
from experiments import cli
from phase_jax.errors import UserError
from phase_jax.run import RunConfig

# id: (W, S, KV heads, what differs from the reference model)
TABLE = {
    "full_attn_1kv": (None, None, 1, {}),
    "full_attn_4kv": (None, None, 4, {}),
    "full_attn_8kv": (None, None, 8, {}),
    "kvc_w8s8_1kv_baseline": (8, 8, 1, {}),
    "kvc_w8s8_1kv_baseline_seed43": (8, 8, 1, {}),
    "kvc_w8s8_1kv_baseline_seed44": (8, 8, 1, {}),
    "kvc_w8s8_1kv_baseline_seed45": (8, 8, 1, {}),
    "kvc_w4s4_1kv": (4, 4, 1, {}),
    "kvc_w8s4": (8, 4, 1, {}),
    "kvc_w8s6": (8, 6, 1, {}),
    "kvc_w12s12_1kv": (12, 12, 1, {}),
    "kvc_w8s8_2kv": (8, 8, 2, {}),
    "kvc_w8s8_4kv": (8, 8, 4, {}),
    "kvc_w8s8_8kv": (8, 8, 8, {}),
    "kvc_w8s8_1kv_kvshare": (8, 8, 1, {"tied_kv": True}),
    "kvc_w8s8_1kv_meanpool": (8, 8, 1, {"gate": "uniform"}),
    "kvc_w8s8_1kv_mean_kvshare_postnorm": (8, 8, 1, {"gate": "uniform", "tied_kv": True, "post_norm": True}),
    "kvc_w8s8_1kv_vector": (8, 8, 1, {"gate": "vector"}),
    "kvc_w8s8_1kv_noQKnorm": (8, 8, 1, {"qk_norm": False}),
    "kvc_w8s8_1kv_nobias": (8, 8, 1, {"gate_bias": False}),
    "kvc_w8s8_1kv_nope": (8, 8, 1, {"rope_dims": 0}),
    "kvc_w8s8_1kv_rope16": (8, 8, 1, {"rope_dims": 16}),
    "kvc_w8s8_1kv_tail_concat": (8, 8, 1, {"exact": "tail"}),
    "kvc_w8s8_8kv_tail_concat": (8, 8, 8, {"exact": "tail"}),
    "kvc_w8s4_dsv4kernel_1kv_rope16": (
        8,
        4,
        1,
        {"gate": "vector", "tied_kv": True, "rope_dims": 16, "origin": -4, "map_sharing": "part"},
    ),
    "kvc_w8s4_dsv4kernel_1kv_scalar_rope16": (
        8,
        4,
        1,
        {"tied_kv": True, "rope_dims": 16, "origin": -4, "map_sharing": "part"},
    ),
    "kvc_w12s12_4kv": (12, 12, 4, {}),
}

REFERENCE = {
    "origin": 0,
    "gate": "scalar",
    "gate_bias": True,
    "map_sharing": "offset",
    "tied_kv": False,
    "post_norm": False,
    "qk_norm": True,
    "rope_dims": None,
    "exact": "window",
}

PAPER = {
    "layers": 28,
    "width": 1024,
    "query_heads": 16,
    "head_dim": 128,
    "mlp_width": 3072,
    "vocabulary": 151_936,
    "norm_eps": 1e-6,
    "rope_theta": 1e6,
    "logit_scale": 1.0,
    "exact_width": 16,
}

LAB = {"width": 64, "mlp_width": 128, "rope_theta": 100.0, "vocabulary": 131, "norm_eps": 1e-6}

# id: (bytes of keys and values a token, over both layers of the lab's models; share of full attention). By hand, in
# f32: 2 layers · 2 (keys, values; 1 if tied) · KV heads · head_dim · 4 bytes / S; head_dim 32, or 16 from 4 KV heads.
CACHE = {
    "full_attn_1kv": (512, 1),
    "full_attn_4kv": (1024, 1),
    "full_attn_8kv": (2048, 1),
    "kvc_w8s8_1kv_baseline": (64, 1 / 8),
    "kvc_w4s4_1kv": (128, 1 / 4),
    "kvc_w8s4": (128, 1 / 4),
    "kvc_w8s6": (512 / 6, 1 / 6),
    "kvc_w12s12_1kv": (512 / 12, 1 / 12),
    "kvc_w8s8_2kv": (128, 1 / 8),
    "kvc_w8s8_4kv": (128, 1 / 8),
    "kvc_w8s8_8kv": (256, 1 / 8),
    "kvc_w8s8_1kv_kvshare": (32, 1 / 16),
    "kvc_w8s8_1kv_mean_kvshare_postnorm": (32, 1 / 16),
    "kvc_w8s8_1kv_tail_concat": (64, 1 / 8),
    "kvc_w8s4_dsv4kernel_1kv_rope16": (64, 1 / 8),
    "kvc_w12s12_4kv": (1024 / 12, 1 / 12),
}


def test_the_family_has_the_27_ids_of_the_table():
    assert len(TABLE) == 27 and set(FAMILY) == set(TABLE)


@pytest.mark.parametrize("scale", ["lab", "paper"])
@pytest.mark.parametrize("variant", TABLE)
def test_every_id_is_what_the_table_says(variant, scale):
    window, stride, kv_heads, differs = TABLE[variant]
    config = dataclasses.asdict(model_config(variant, scale))
    assert (config["window"], config["stride"], config["kv_heads"]) == (window, stride, kv_heads)
    expected = {**REFERENCE, **differs, **(PAPER if scale == "paper" else LAB)}
    assert {name: config[name] for name in expected} == expected


@pytest.mark.parametrize("variant", TABLE)
def test_the_lab_gives_each_id_heads_and_an_exact_window(variant):
    window, _, kv_heads, _ = TABLE[variant]
    config = model_config(variant)
    assert (config.query_heads, config.head_dim) == ((8, 16) if kv_heads >= 4 else (4, 32))
    assert config.exact_width == (12 if window == 12 else 8) and config.layers in (2, 3)


@pytest.mark.parametrize("variant", TABLE)
def test_seeds_are_42_but_for_the_replicas_that_name_theirs(variant):
    replicas = {f"kvc_w8s8_1kv_baseline_seed{seed}": seed for seed in (43, 44, 45)}
    assert default_seed(variant) == replicas.get(variant, 42)


@pytest.mark.parametrize("variant", TABLE)
def test_every_id_makes_a_run_of_the_lab(variant):
    values = lab.get_config(variant).to_dict()
    run = RunConfig.from_dict(values)
    # The recipe may choose how large parameters begin; all else is the family's.
    begins = {"initial_std": run.model.initial_std, "embedding_std": run.model.embedding_std}
    assert run.model == dataclasses.replace(model_config(variant), **begins)
    assert run.id == variant and run.seed == default_seed(variant)
    assert run.model.vocabulary == run.data.vocabulary.size
    assert max(stage[2] for stage in run.data.curriculum) >= run.data.length, "trained up to the length measured"
    assert RunConfig.from_dict(json.loads(json.dumps(run.to_dict()))) == run, "config.json holds all of it"


@pytest.mark.parametrize("variant", TABLE)
def test_every_compressed_id_makes_a_long_run_of_the_lab(variant):
    if model_config(variant).windows is None:
        with pytest.raises(UserError, match="is for compressed models"):
            lab_long.get_config(variant)
        return
    run = RunConfig.from_dict(lab_long.get_config(variant).to_dict())
    assert run.model.vocabulary == run.data.vocabulary.size == 3 + 1024 + 64
    assert run.data.records == run.data.words == 1024 and run.data.length >= 4096
    assert run.data.curriculum[-1][1:3] == (run.data.records, run.data.length), "trained up to the length measured"
    # What the id is about stays.
    same = ("window", "stride", "kv_heads", "gate", "gate_bias", "tied_kv", "qk_norm", "post_norm", "exact", "origin")
    assert all(getattr(run.model, name) == getattr(model_config(variant), name) for name in same)


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("kvc_w8s8_1kv_noqknorm", "kvc_w8s8_1kv_noQKnorm"),
        ("full_attn_1k", "full_attn_1kv"),
        ("kvc_w4s4_1k", "kvc_w4s4_1kv"),
    ],
)
def test_an_unknown_id_names_the_nearest(typed, nearest):
    with pytest.raises(UserError, match=f"unknown model id '{typed}'; did you mean '{nearest}'"):
        model_config(typed)


def test_an_id_that_is_near_to_nothing_names_the_list():
    with pytest.raises(UserError, match="unknown model id 'zzzz'; phase-jax configs lists them"):
        model_config("zzzz")


@pytest.fixture(scope="module")
def rows():
    """What `phase-jax configs --json` prints."""
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("builtins.print", lambda text, **_: printed.append(text))
        assert cli.main(["configs", "--json"]) == 0
    return {row["id"]: row for row in json.loads(printed[0])["rows"]}


def test_configs_prints_one_row_an_id(rows):
    assert list(rows) == list(FAMILY)
    keys = {"id", "W", "S", "kv_heads", "parameters", "cache_bytes_per_token", "cache_ratio"}
    for variant, row in rows.items():
        assert set(row) == keys
        assert (row["W"], row["S"], row["kv_heads"]) == TABLE[variant][:3]


@pytest.mark.parametrize("variant", CACHE)
def test_cache_bytes_by_hand(rows, variant):
    found = rows[variant]["cache_bytes_per_token"], rows[variant]["cache_ratio"]
    assert found == pytest.approx(CACHE[variant])


def test_parameters_of_two_lab_models_by_hand(rows):
    # Width 64, 4 query heads of 32, 1 KV head, MLP 128: query and out, key and value, MLP, norms; 2 layers.
    layer = 2 * 64 * 4 * 32 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 32
    around = 131 * 64 + 64
    assert rows["full_attn_1kv"]["parameters"] == around + 2 * layer
    # W8/S8 adds for keys and for values 8 maps to payloads and to one gate number, and 8 biases.
    assert rows["kvc_w8s8_1kv_baseline"]["parameters"] == around + 2 * (layer + 2 * (8 * 64 * 33 + 8))


def test_configs_prints_a_table(capsys, monkeypatch):
    monkeypatch.setattr("experiments.configs.parameter_count", lambda config: 1234567)
    assert cli.main(["configs", "--scale", "paper"]) == 0
    printed = capsys.readouterr().out
    assert all(variant in printed for variant in FAMILY) and "1,234,567" in printed and "paper scale" in printed
