import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from phase_jax.statistics import as_correct, fold, phase_report, to_json

# Issue A, "Interfaces", and issue B, item 1; sigma_interval is ours.
FIELDS = """model W S kv_heads protocol residues n_logical validation_loss accuracy wilson_low wilson_high nll
gold_probability target_position_mean target_position_variance mean worst worst_residue gap sigma normalised_gap period
by_phase phase_worst phase_gap phase_sigma boundary_phase within_window_gap bootstrap_low bootstrap_high mean_interval
worst_interval gap_interval gap_percentile_interval verdict p_value sigma_interval""".split()
FEW = {"replicates": 100, "permutations": 100}


def check(report):
    """Every field, valid JSON without NaN, ordered intervals inside [0, 1] that hold what they should."""
    assert set(report) == set(FIELDS)
    json.dumps(report, allow_nan=False)
    for low, high in [
        *zip(report["wilson_low"], report["wilson_high"], strict=True),
        *zip(report["bootstrap_low"], report["bootstrap_high"], strict=True),
        *(report[f"{name}_interval"] for name in ("mean", "worst", "gap", "sigma", "gap_percentile")),
    ]:
        assert 0 <= low <= high <= 1
    for name in ("mean", "worst", "sigma"):
        low, high = report[f"{name}_interval"]
        assert low - 1e-9 <= report[name] <= high + 1e-9
    assert report["gap_interval"][0] <= report["gap"] <= report["gap_interval"][1] + 1e-9
    assert report["verdict"] in ("sensitive", "not seen", "undecided")
    assert 0 < report["p_value"] <= 1


@settings(max_examples=40, deadline=None)
@given(arrays(bool, st.tuples(st.integers(1, 9), st.integers(2, 9))))
def test_every_small_sweep_has_a_report(correct):
    check(phase_report(correct, None, **FEW).to_dict())


@pytest.mark.parametrize("rows", [1, 2, 100])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_right_and_all_wrong(rows, value):
    report = phase_report(np.full((rows, 24), value), 8, width=8, **FEW).to_dict()
    check(report)
    assert report["mean"] == value and report["gap"] == 0 and report["period"] is None and report["p_value"] == 1
    assert report["normalised_gap"] == (0.0 if value else None)
    # An interval of no width would claim certainty.
    for name in ("mean", "worst"):
        low, high = report[f"{name}_interval"]
        assert high - low > 0.9 / (rows + 1)
    assert report["verdict"] == ("not seen" if rows == 100 else "undecided")


def test_deterministic_phases():
    report = phase_report(np.tile(np.arange(8) < 4, (200, 3)), 8, width=8).to_dict()
    check(report)
    assert report["period"] == 8 and report["verdict"] == "sensitive" and report["gap"] == 1
    assert report["gap_interval"][0] > 0.9 and report["worst_interval"][1] < 0.05
    assert report["boundary_phase"] == 0 and report["within_window_gap"] == 1


def test_numbers_by_hand():
    correct = np.array([[1, 0, 1, 0, 1, 0], [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 1, 0], [1, 0, 1, 0, 1, 1]])
    report = phase_report(correct, 3, width=3, **FEW).to_dict()
    assert report["accuracy"] == [1, 0.25, 0.75, 0, 0.75, 0.25]
    assert report["mean"] == 0.5 and report["worst"] == 0 and report["worst_residue"] == 3 and report["gap"] == 1
    assert report["sigma"] == pytest.approx(np.sqrt(np.mean([0.25, 0.0625, 0.0625, 0.25, 0.0625, 0.0625])))
    assert report["normalised_gap"] == 2
    assert report["by_phase"] == [0.5, 0.5, 0.5] and report["phase_gap"] == 0 and report["phase_sigma"] == 0
    assert report["boundary_phase"] == 0.5 and report["within_window_gap"] == 0


def test_full_attention_has_no_phases():
    report = phase_report(np.eye(6), None, **FEW).to_dict()
    for name in (
        "W",
        "S",
        "by_phase",
        "phase_worst",
        "phase_gap",
        "phase_sigma",
        "boundary_phase",
        "within_window_gap",
    ):
        assert report[name] is None


@pytest.mark.parametrize(("stride", "width"), [(4, 8), (6, 8), (4, None)])
def test_no_boundary_phase_with_overlap(stride, width):
    report = phase_report(np.eye(24), stride, width=width, **FEW).to_dict()
    assert report["boundary_phase"] is None and report["within_window_gap"] is None
    assert len(report["by_phase"]) == stride


def test_details_and_labels():
    rng = np.random.default_rng(0)
    correct, nll, position = rng.random((5, 6)) < 0.5, rng.random((5, 6)), rng.integers(100, size=(5, 6))
    nll[2, 1] = np.inf
    report = phase_report(
        correct, 3, nll=nll, gold_probability=np.exp(-nll), target_position=position, model="m", width=6, kv_heads=1,
        protocol="prefix", validation_loss=0.5, **FEW,
    ).to_dict()  # fmt: skip
    check(report)
    assert report["nll"][1] is None and report["nll"][0] == pytest.approx(nll[:, 0].mean())
    assert report["target_position_variance"] == pytest.approx(list(position.var(axis=0)))
    labels = ("model", "W", "S", "kv_heads", "protocol", "residues", "n_logical", "validation_loss")
    assert [report[name] for name in labels] == ["m", 6, 3, 1, "prefix", 6, 5, 0.5]
    with pytest.raises(ValueError, match=r"nll: expected the shape of correct, \(5, 6\), got \(5, 5\)"):
        phase_report(correct, 3, nll=nll[:, 1:])


@pytest.mark.parametrize(
    ("correct", "message"),
    [
        ([[1, 0], [1]], "rows differ in length"),
        ([[1, 0], [np.nan, 1]], "NaN at logical sample 1, residue 0"),
        ([[1, 0.5]], "0 or 1"),
        ([["a", "b"]], "0 or 1"),
        ([[2, 1]], "0 or 1"),
        ([1, 0], r"expected \[N, R\]"),
        (np.zeros((0, 24)), "at least 1 logical sample"),
        (np.zeros((3, 1)), "2 residues"),
    ],
)
def test_bad_input_is_one_clear_line(correct, message):
    with pytest.raises(ValueError, match=message) as error:
        phase_report(correct, None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("stride", [5, 0, -8, 48])
def test_stride_must_divide(stride):
    with pytest.raises(ValueError, match=f"stride {stride} does not divide the 24 residues"):
        phase_report(np.zeros((3, 24)), stride)


def test_accepted_forms_are_one():
    expected = np.array([[True, False], [False, True]])
    for form in (
        [[1, 0], [0, 1]],
        [[True, False], [False, True]],
        np.eye(2, dtype=np.float32),
        np.eye(2, dtype=np.int8),
    ):
        np.testing.assert_array_equal(as_correct(form), expected)


def test_fold_agrees_with_a_loop():
    values = np.random.default_rng(0).random((3, 24))
    expected = [[np.mean([row[r] for r in range(24) if r % 6 == phase]) for phase in range(6)] for row in values]
    np.testing.assert_allclose(fold(values, 6), expected)


def test_to_json():
    value = {
        "a": np.float32(0.5),
        "b": [np.nan, -np.inf, np.int64(3)],
        "c": np.array([[True, False]]),
        "d": (None, "x"),
    }
    assert to_json(value) == {"a": 0.5, "b": [None, None, 3], "c": [[True, False]], "d": [None, "x"]}


def test_imports_stay_light():
    """Neither JAX nor (until an interval is asked for) statsmodels and pandas."""
    code = "import sys, phase_jax.statistics; print([m for m in ('jax', 'statsmodels', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
