"""Every figure of the project, in one style; made from stored reports (see phase_jax.statistics.PhaseReport)."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

# Two hues that stay apart for colour-blind readers and in grey; text is darker than lines.
PROTOCOL_STYLE = {
    "prefix": {"color": "#1f5fa8", "marker": "o"},
    "insequence": {"color": "#c4572b", "marker": "s"},
    "target": {"color": "#4b8b3b", "marker": "^"},
}
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777777",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "svg.fonttype": "none",
    "svg.hashsalt": "phase-jax",
    "figure.dpi": 110,
    "savefig.dpi": 160,
}


def title(report: dict) -> str:
    """`W8/S8 · 1 KV head`, or `full attention · …`."""
    heads = f"{report['kv_heads']} KV head" + ("s" if report["kv_heads"] != 1 else "")
    return f"full attention · {heads}" if report["W"] is None else f"W{report['W']}/S{report['S']} · {heads}"


def by_model(reports: Sequence[dict]) -> dict[str, list[dict]]:
    """Reports grouped by model, in the order in which models first occur."""
    groups: dict[str, list[dict]] = {}
    for report in reports:
        groups.setdefault(report["model"], []).append(report)
    return groups


def draw_accuracy(axes: Axes, reports: Sequence[dict]) -> None:
    """One model's accuracy over residues, a curve a protocol with its 95 % Wilson band; stride boundaries as lines.

    The first report's mean is the dashed line, its worst residue is ringed and named.
    """
    first = reports[0]
    residues = np.arange(first["residues"])
    if first["S"]:
        for boundary in range(0, first["residues"] + 1, first["S"]):
            axes.axvline(boundary - 0.5, color="#bbbbbb", linewidth=0.7, zorder=0)
    for report in reports:
        style = PROTOCOL_STYLE[report["protocol"]]
        axes.fill_between(
            residues, report["wilson_low"], report["wilson_high"], color=style["color"], alpha=0.18, linewidth=0
        )
        axes.plot(residues, report["accuracy"], linewidth=1.4, markersize=3, label=report["protocol"], **style)
    color = PROTOCOL_STYLE[first["protocol"]]["color"]
    axes.axhline(first["mean"], color=color, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
    worst_at, worst = first["worst_residue"], first["worst"]
    axes.plot(worst_at, worst, "o", markersize=9, fillstyle="none", color="#222222", markeredgewidth=1.1)
    period = first["period"] or "none"
    axes.text(
        1.0,
        1.02,
        f"mean {first['mean']:.0%} · worst {worst:.0%} at {worst_at} · period {period}",
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        color="#333333",
        fontsize=8,
    )
    axes.set_title(title(first), pad=16)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlim(-0.7, first["residues"] - 0.3)
    axes.set_xticks(np.arange(0, first["residues"], 4))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def accuracy_figure(reports: Sequence[dict]) -> Figure:
    """The paper's accuracy figure: one panel a model, two in a row."""
    groups = by_model(reports)
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6 * columns + 0.4, 2.5 * rows + 0.7), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes, group in zip(grid.flat, groups.values(), strict=False):
            draw_accuracy(axes, group)
        for axes in grid.flat[len(groups) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_ylabel("accuracy")
        for axes in grid[-1]:
            axes.set_xlabel("position of the target key, mod 24")
        protocols = {report["protocol"] for report in reports}
        handles, labels = max((axes.get_legend_handles_labels() for axes in grid.flat), key=lambda pair: len(pair[1]))
        if len(protocols) > 1:
            names = [f"{label} padding" for label in labels]
            figure.legend(handles, names, loc="outside upper right", ncols=len(labels), frameon=False)
    return figure


def save(figure: Figure, path: Path) -> list[Path]:
    """Writes `path` with .png and .svg; the same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    with matplotlib.rc_context(STYLE):
        for file in written:
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return written
