"""The completion flip as a figure and as a sentence; made from a stored report (see phase_jax.evaluation.flip)."""

from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from phase_jax.reports.curves import Band
from phase_jax.reports.figures import COLORS, PANEL_WIDTH, STYLE, draw_band

CONTINUATIONS = {
    "right": {"color": COLORS["target"], "marker": "o"},
    "wrong": {"color": COLORS["insequence"], "marker": "s"},
}
ODDS = {"color": COLORS["prefix"], "marker": "D"}
SMALL = 0.1  # where no probability is larger, a scale from 0 to 1 shows nothing


def flip_figure(report: Mapping) -> Figure:
    """Against the filler's length, a column a filler family: probabilities of both continuations, and their log-odds.

    Probabilities are on a scale from 0 to 1, or, where all are small, on a logarithmic one. Where there is a period,
    the lengths at which the wrong one is preferred on average have a ground of their own.
    """
    families, lengths = report["families"], np.array(report["lengths"])
    small = max(max(family[name]) for family in families for name in CONTINUATIONS) < SMALL
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(0.6 * PANEL_WIDTH * len(families) + 0.8, 4.2), layout="constrained")
        grid = figure.subplots(2, len(families), sharex=True, sharey="row", squeeze=False)
        for (top, bottom), family in zip(grid.T, families, strict=True):
            for group in report["groups"] or ():
                if group["prefers"] == "wrong":
                    for length in lengths[np.isin(lengths % report["period"], group["phases"])]:
                        for axes in (top, bottom):
                            axes.axvspan(length - 0.5, length + 0.5, color=COLORS["shade"], linewidth=0, zorder=0)
            for name, style in CONTINUATIONS.items():
                text = report.get(f"{name}_text")
                label = name if text is None else f"{name}: {text!r}"
                draw_band(top, lengths, Band(np.array(family[name])), style, label=label)
            bottom.axhline(0, color=COLORS["quiet"], linewidth=0.8, zorder=1)
            draw_band(bottom, lengths, Band(np.array(family["log_odds"])), ODDS)
            top.set_title(f"{family['filler']}, period {family['period'] or 'none'}")
            bottom.set_xlim(lengths[0] - 0.7, lengths[-1] + 0.7)
            bottom.set_xlabel("filler tokens")
            bottom.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        shared = grid[0, 0]  # its scale is all columns'
        shared.set_ylabel("probability")
        if small:
            shared.set_yscale("log")
            shared.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            shared.yaxis.set_major_formatter("{x:g}")
            shared.yaxis.set_minor_locator(NullLocator())
        else:
            shared.set_ylim(-0.02, 1.02)
        grid[1, 0].set_ylabel("log-odds (nats)")
        figure.align_ylabels(grid[:, 0])
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)
    return figure


def flip_sentence(report: Mapping) -> str:
    """What was found, in plain words."""
    count, rankings, wrong = len(report["lengths"]), report["rankings"], report["wrong"]
    stride = "" if report.get("S") is None else f" The model's stride is {report['S']}."
    low, high = report["odds_range"]
    between = f"averaged over fillers they are {low:.2g} to {high:.2g} nats"
    if report["period"] is None:
        return (
            f"No period of the log-odds stands out over {count} filler lengths ({between}); the wrong continuation is"
            f" preferred in {wrong} of {rankings} rankings.{stride}"
        )
    found = (
        f"The log-odds repeat every {report['period']} filler tokens (p = {report['p_value']:.2g}; {between}, and the"
        f" phase explains {report['explained']:.0%} of their variance)"
    )
    groups = report["groups"]
    if len(groups) == 1:
        return (
            f"{found}, but no preference flips: at every phase the {groups[0]['prefers']} continuation is preferred on"
            f" average; the wrong one in {wrong} of {rankings} rankings.{stride}"
        )
    said = [
        f"the {group['prefers']} continuation is preferred at lengths ≡ {', '.join(map(str, group['phases']))} (mod"
        f" {report['period']}; mean probabilities right {group['right']:.3g}, wrong {group['wrong']:.3g})"
        for group in groups
    ]
    return f"{found}: {', '.join(said)}; {report['following']} of {rankings} rankings follow.{stride}"
