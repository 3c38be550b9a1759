"""Heat maps of knockouts: which heads a run loses answers with, and at which residues (SPEC §7).

Made from what `phase-jax knockout` stored.
"""

from collections.abc import Iterator, Mapping

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from phase_jax.reports import figures, wording
from phase_jax.reports.figures import COLORS, PANEL_WIDTH, STYLE
from phase_jax.reports.gates import Drawing

LIMIT = 100  # percent, at both ends of the colours of every map, so that maps compare
PALE = 0.2  # of the colour of a change that may be none
SHOWN = ("head", "set", "layer")


def drawings(interventions: Mapping[str, Mapping]) -> Iterator[Drawing]:
    """The heat map of every padding that a run's knockouts were measured under."""
    for name, report in sorted(interventions.items()):
        if name.startswith("knockout-"):
            yield _map(report)


def _map(report: Mapping) -> Drawing:
    entries = [entry for entry in report["knockouts"] if entry["kind"] in SHOWN]
    heads = [entry for entry in entries if entry["kind"] == "head"]
    worst = min(heads, key=lambda entry: entry["mean"])
    means = "all calibration prompts" if report["means"] == "all" else "calibration prompts of the target's phase"
    return Drawing(
        f"knockout-{report['protocol']}",
        f"knockouts of heads, {wording.padding(report['protocol'])}",
        f"Relative change of accuracy at every residue when one of {len(heads)} KV heads of {report['model']} says at"
        f" the last position what it says on average over {means}. The largest loss is of head {worst['name']}:"
        f" {wording.points(-worst['mean'])} on average.",
        knockout_figure(report),
        ["knockout", "mean", "worst", "gap", "NLL (nats)", "p, same share", *map(str, range(report["residues"]))],
        [_row(entry) for entry in entries],
    )


def _row(entry: Mapping) -> list[str]:
    def change(field: str, scale: float, digits: int) -> str:
        low, high = (f"{scale * bound:+.{digits}f}" for bound in entry[f"{field}_interval"])
        return f"{scale * entry[field]:+.{digits}f} ({low} to {high})"

    relative = (wording.NONE if x is None else f"{x:+.0f} %" for x in entry["relative_change"])
    points = (change(field, 100, 1) for field in ("mean", "worst", "gap"))
    return [label(entry), *points, change("nll", 1, 2), wording.p_value(entry["p_relative"]), *relative]


def label(entry: Mapping) -> str:
    """A knockout's name on an axis."""
    over = f", last {entry['band']}" if entry["band"] > 1 else ""
    return entry["name"] + over


def knockout_figure(report: Mapping) -> Figure:
    """Knockouts × residues: the relative change of accuracy in diverging colours about zero, clipped at ±100 %.

    Above the map is the accuracy without a knockout; where it is 0 a cell has no value and is hatched. A cell is pale
    where its 95 % interval holds zero, or has no end. Lines stand where a stride begins; below the heads, apart, are
    sets and whole layers.
    """
    entries = [entry for entry in report["knockouts"] if entry["kind"] in SHOWN]
    heads = sum(entry["kind"] == "head" for entry in entries)
    residues, count = report["residues"], len(entries)
    places = np.arange(count) + 0.4 * (np.arange(count) >= heads)
    height = max(0.09, 0.24 * min(1, 24 / count)) * count
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PANEL_WIDTH, 1.75 + height), layout="constrained")
        top, axes = figure.subplots(2, 1, sharex=True, height_ratios=[0.75, height])
        figures.draw_boundaries(top, residues, report["S"])
        top.bar(np.arange(residues), report["clean"]["accuracy"], color=COLORS["quiet"], width=0.8)
        top.set_ylim(0, 1)
        top.set_yticks([0, 1], ["0 %", "100 %"])
        top.set_title("accuracy without a knockout", fontsize=8, fontweight="normal", pad=5)
        edges = np.arange(residues + 1) - 0.5
        scale = ScalarMappable(Normalize(-LIMIT, LIMIT), "RdBu")
        for place, entry in zip(places, entries, strict=True):
            change, low, high = (np.array(entry[f"relative_{name}"], float) for name in ("change", "low", "high"))
            colors = scale.to_rgba(change)
            sure = (low > 0) | (high < 0)
            colors[~sure, :3] = 1 - PALE * (1 - colors[~sure, :3])
            colors[np.isnan(change), 3] = 0
            rows = place - 0.5, place + 0.5
            axes.axhspan(*rows, facecolor="none", edgecolor=COLORS["rule"], hatch="////", linewidth=0)
            axes.pcolormesh(edges, rows, colors[None])
        for boundary in range(0, residues + 1, report["S"]) if report["S"] else ():
            axes.axvline(boundary - 0.5, color=COLORS["ink"], linewidth=0.8)
        axes.set_ylim(places[-1] + 0.5, -0.5)
        axes.set_xlim(-0.5, residues - 0.5)
        every = -(-count // 32)
        axes.set_yticks(places[::every], [label(entry) for entry in entries[::every]])
        axes.tick_params(axis="y", length=0)
        axes.set_xticks(np.arange(0, residues, 1 if residues <= 12 else 4))
        axes.set_ylabel("layer.head")
        axes.set_xlabel(f"position of the target key, mod {residues}")
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        bar = figure.colorbar(
            scale, ax=axes, location="bottom", aspect=40, pad=0.02, extend="max", ticks=[-100, -50, 0, 50, 100]
        )
        bar.set_label("change of accuracy, % of what it is without a knockout")
        bar.outline.set_visible(False)
    return figure
