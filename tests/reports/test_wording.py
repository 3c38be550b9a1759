"""Sentences say what the numbers say."""

import dataclasses

import pytest

from phase_jax.reports import wording
from phase_jax.reports.results import Result, load


@pytest.fixture
def runs(lab_folder):
    return load([lab_folder])


def test_nothing_is_shown_as_a_dash():
    assert {wording.percent(None), wording.percents(None), wording.points(None), wording.number(None)} == {"–"}
    assert wording.percent(0.5234) == "52.3 %" and wording.percents((0.1, 1)) == "10.0–100.0 %"
    assert wording.p_value(1e-4) == "< 0.001" and wording.p_value(0.25) == "0.250"
    assert wording.listed(["a"]) == "a" and wording.listed(["a", "b", "c"]) == "a, b and c"


def test_a_finding_names_verdict_protocols_and_the_worst_place(runs):
    sentence = wording.finding(runs[1].results)
    worst = min((result.report for result in runs[1].results), key=lambda report: report["worst"])
    assert sentence.startswith("Phase sensitive under prefix and in-sequence padding: ")
    assert f"at residue {worst['worst_residue']} (phase {worst['worst_residue'] % 8} of 0–7)" in sentence
    assert f"{100 * worst['worst']:.1f} %" in sentence and sentence.endswith("the curve repeats every 8 tokens.")


def test_verdicts_that_differ_are_told_apart(runs):
    first, second = (dict(result.report) for result in runs[0].results)
    first |= {"verdict": "not seen", "gap_interval": [0.0, 0.08]}
    second |= {"verdict": "undecided", "gap_interval": [0.0, 0.2], "p_value": 0.2}
    sentence = wording.finding([Result(first), Result(second)])
    assert sentence.startswith("Undecided under in-sequence padding: ") and "20.0 points" in sentence
    assert "; no phase sensitivity seen under prefix padding: " in sentence and "8.0 points" in sentence


def test_limits_are_those_of_the_protocols_measured(runs):
    limits = " ".join(wording.limits(runs, None))
    assert "the distractors move too" in limits and "target padding: it was not measured" in limits
    assert "laboratory scale" in limits and "(W > S)" not in limits
    alone = [dataclasses.replace(runs[1], results=runs[1].results[:1], config=None)]
    limits = " ".join(wording.limits(alone, [0.2]))
    assert "in-sequence and target padding: it was not measured" in limits and "laboratory scale" not in limits
    assert "p (Holm)" in limits
