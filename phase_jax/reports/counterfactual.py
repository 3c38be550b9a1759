"""How much of a run's gap each cause carries: made from what `phase-jax counterfactual` stored."""

from collections.abc import Iterator, Mapping

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from phase_jax.reports import wording
from phase_jax.reports.figures import COLORS, PANEL_WIDTH, STYLE
from phase_jax.reports.gates import Drawing

CAUSES = {
    "boundary": "boundary",
    "input": "input-dependent gates",
    "static": "static gates",
    "payload": "payload maps",
}
CHECKS = {"uniform": "both kinds of gates (uniform)", "shuffled": "gates of another head"}


def drawings(interventions: Mapping[str, Mapping]) -> Iterator[Drawing]:
    """The causes under every padding that they were measured under."""
    for name, report in sorted(interventions.items()):
        if name.startswith("counterfactual-"):
            yield _causes(report)


def rows(report: Mapping) -> list[list[str]]:
    """The table of causes: what each explains alone and in order, with intervals, and the mean accuracy then."""
    conditions = report["conditions"]
    cells, taken = [], ""
    for cause, words in CAUSES.items():
        taken = f"{taken}+{cause}".strip("+")
        alone, ordered = (_points(report[column][cause]) for column in ("alone", "in_order"))
        cells.append([words, alone, _mean(conditions[cause]), ordered, _mean(conditions[taken])])
    cells.append(["what remains", "", "", _points(report["remains"]), _mean(report["remains"])])
    return cells + [
        [words, _points(report["alone"][name]), _mean(conditions[name]), "", ""] for name, words in CHECKS.items()
    ]


HEADINGS = ("cause", "gap explained alone", "mean without it", "explained in this order", "mean left")


def _points(entry: Mapping | None) -> str:
    if entry is None:
        return wording.NONE
    low, high = (f"{100 * bound:+.1f}" for bound in entry["gap_interval"])
    return f"{100 * entry['gap']:+.1f} ({low} to {high})"


def _mean(numbers: Mapping) -> str:
    return wording.percent(numbers["mean"])


def _causes(report: Mapping) -> Drawing:
    clean = report["conditions"]["clean"]
    parts = [
        f"{words} {100 * report['in_order'][cause]['gap']:.1f}"
        for cause, words in CAUSES.items()
        if report["in_order"][cause]
    ]
    return Drawing(
        f"counterfactual-{report['protocol']}",
        f"what carries the gap, {wording.padding(report['protocol'])}",
        f"Of the gap of {wording.points(clean['gap'])} of {report['model']}, in points and in this order:"
        f" {', '.join(parts)}; {100 * report['remains']['gap']:.1f} remain.",
        causes_figure(report),
        HEADINGS,
        rows(report),
    )


def causes_figure(report: Mapping) -> Figure:
    """The gap that each cause explains, alone (hollow) and in order (filled), and what remains, with 95 % intervals."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PANEL_WIDTH, 2.9), layout="constrained")
        axes = figure.subplots()
        for shift, column, fill in ((-0.15, "alone", "none"), (0.15, "in_order", "full")):
            entries = [report[column][cause] for cause in CAUSES] + [report["remains"] if fill == "full" else None]
            for place, entry in enumerate(entries):
                if entry is not None:
                    style = {"color": COLORS["quiet" if place == len(CAUSES) else "other"]}
                    axes.hlines(place + shift, *entry["gap_interval"], linewidth=1.4, alpha=0.6, **style)
                    axes.plot(entry["gap"], place + shift, "o", fillstyle=fill, markersize=5, **style)
            axes.plot([], [], "o", fillstyle=fill, color=COLORS["other"], label=column.replace("_", " "))
        axes.axvline(0, color=COLORS["rule"], linewidth=0.8, zorder=0)
        axes.axvline(report["conditions"]["clean"]["gap"], color=COLORS["ink"], linewidth=0.8, linestyle=(0, (5, 3)))
        axes.set_yticks(range(len(CAUSES) + 1), [*CAUSES.values(), "what remains"])
        axes.set_ylim(len(CAUSES) + 0.5, -0.5)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("gap explained (dashed: the gap as it is)")
        figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return figure
