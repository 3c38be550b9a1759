"""Folded curves agree with the report; their bands are narrower where prompts are stored."""

import numpy as np

from phase_jax.reports.curves import folded, unfolded
from phase_jax.reports.results import Result, load


def test_folded_curves_and_bands(lab_folder):
    (run,) = load([lab_folder / "kvc_w8s8_1kv_baseline"])
    result = run.results[0]
    curves = folded(result)
    np.testing.assert_allclose(curves.accuracy.value, result.report["by_phase"])
    np.testing.assert_allclose(curves.nll.value, np.reshape(result.report["nll"], (3, 8)).mean(axis=0))
    assert curves.boundary
    bare = folded(Result(result.report))
    for band in (curves.accuracy, curves.nll, bare.accuracy):
        assert (band.low <= band.value).all() and (band.value <= band.high).all()
    assert bare.nll.low is None
    assert np.mean(bare.accuracy.high - bare.accuracy.low) > np.mean(curves.accuracy.high - curves.accuracy.low)


def test_full_attention_has_nothing_to_fold(lab_folder):
    (run,) = load([lab_folder / "full_attn_1kv"])
    assert folded(run.results[0]) is None
    curves = unfolded(run.results[0])
    np.testing.assert_array_equal(curves.accuracy.low, run.results[0].report["wilson_low"])
    assert not curves.boundary
