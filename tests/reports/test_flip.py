"""The completion flip in words and as a figure, from a stored report."""

import matplotlib.colors
import numpy as np

from phase_jax.reports.figures import COLORS, render
from phase_jax.reports.flip import flip_figure, flip_sentence


def report(**changes):
    lengths = list(range(24, 40))
    right = [0.9 if length % 4 in (2, 3) else 0.25 for length in lengths]
    family = {
        "filler": "equals",
        "right": right,
        "wrong": [0.97 - p for p in right],
        "log_odds": [float(np.log(p / (0.97 - p))) for p in right],
        "period": 4,
        "p_value": 5e-4,
    }
    groups = [
        {"prefers": "right", "phases": [2, 3], "right": 0.915, "wrong": 0.072},
        {"prefers": "wrong", "phases": [0, 1], "right": 0.264, "wrong": 0.713},
    ]
    found = {
        "odds_range": [-0.912, 2.51],
        "explained": 0.876,
        "period": 4,
        "p_value": 5e-4,
        "groups": groups,
        "following": 60,
        "rankings": 64,
        "wrong": 30,
    }
    families = [{**family, "filler": name} for name in ("equals", "dashes")]
    return {"lengths": lengths, "families": families, "right_text": "64", **found, **changes}


def test_a_flip_in_words():
    assert flip_sentence(report(S=4)) == (
        "The log-odds repeat every 4 filler tokens (p = 0.0005; averaged over fillers they are -0.91 to 2.5 nats, and"
        " the phase explains 88% of their variance): the right continuation is preferred at lengths ≡ 2, 3 (mod"
        " 4; mean probabilities right 0.915, wrong 0.072), the wrong continuation is preferred at lengths ≡ 0, 1 (mod"
        " 4; mean probabilities right 0.264, wrong 0.713); 60 of 64 rankings follow. The model's stride is 4."
    )


def test_a_period_without_a_flip_and_no_period_in_words():
    one = report(groups=report()["groups"][:1], wrong=2)
    assert "but no preference flips: at every phase the right" in flip_sentence(one)
    assert "the wrong one in 2 of 64 rankings." in flip_sentence(one)
    none = report(period=None, p_value=None, groups=None, following=None, wrong=4, S=None)
    assert flip_sentence(none) == (
        "No period of the log-odds stands out over 16 filler lengths (averaged over fillers they are -0.91 to 2.5"
        " nats); the wrong continuation is preferred in 4 of 64 rankings."
    )


def test_the_figure_shows_what_is_stored():
    figure = flip_figure(report())
    panels = figure.axes
    assert len(panels) == 4
    for column, family in enumerate(report()["families"]):
        top, bottom = panels[column], panels[2 + column]
        assert top.get_title(loc="left") == f"{family['filler']}, period 4"
        for line, name in zip(top.lines, ("right", "wrong"), strict=True):
            np.testing.assert_array_equal(line.get_ydata(), family[name])
        np.testing.assert_array_equal(bottom.lines[-1].get_ydata(), family["log_odds"])
        shaded = [patch for patch in top.patches if matplotlib.colors.to_hex(patch.get_facecolor()) == COLORS["shade"]]
        assert sorted(round(patch.get_x() + 0.5) for patch in shaded) == [24, 25, 28, 29, 32, 33, 36, 37]
        assert top.get_yscale() == "linear" and top.get_ylim()[1] > 1
    images = render(flip_figure(report(groups=None, period=None)))
    assert images[".png"][:4] == b"\x89PNG" and b"<svg" in images[".svg"]


def test_small_probabilities_are_drawn_apart():
    """Thousandths, as of a model that knows no answer: on a scale from 0 to 1 they would lie on the axis."""
    (family, *_), small = report()["families"], 1e-3
    tiny = {**family, **{name: [small * p for p in family[name]] for name in ("right", "wrong")}}
    for panel in flip_figure(report(families=[tiny, tiny])).axes[:2]:
        low, high = panel.transData.inverted().transform(panel.transAxes.transform([[0, 0], [0, 1]]))[:, 1]
        assert low < small * min(family["wrong"]) and small * max(family["right"]) < high
        heights = panel.transData.transform([(24, small * 0.07), (24, small * 0.9)])[:, 1]
        assert np.ptp(heights) > 0.5 * panel.bbox.height
        assert panel.get_yscale() == "log"
