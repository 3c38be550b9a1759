"""Every figure of the project, in one style; made from stored reports (see phase_jax.statistics.PhaseReport)."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from phase_jax.reports.curves import Band, Curves
from phase_jax.reports.wording import architecture, padding

# Every colour of a figure has a name here: a page gives the names its own colours (`inline`), light or dark.
COLORS = {
    "ink": "#222222",
    "quiet": "#5f6368",
    "rule": "#c4c7cc",
    "shade": "#eef0f2",
    "prefix": "#1f5fa8",
    "insequence": "#c4572b",
    "target": "#4b8b3b",
    "other": "#76519d",
}
# Hues that stay apart for colour-blind readers, and markers that do in grey; text is darker than lines.
PROTOCOL_STYLE = {
    "prefix": {"color": COLORS["prefix"], "marker": "o"},
    "insequence": {"color": COLORS["insequence"], "marker": "s"},
    "target": {"color": COLORS["target"], "marker": "^"},
}
OTHER_STYLE = {"color": COLORS["other"], "marker": "D"}
STYLE = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "text.color": COLORS["ink"],
    "text.parse_math": False,
    "axes.labelcolor": COLORS["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": COLORS["quiet"],
    "xtick.color": COLORS["quiet"],
    "ytick.color": COLORS["quiet"],
    "xtick.labelcolor": COLORS["ink"],
    "ytick.labelcolor": COLORS["ink"],
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.facecolor": "#ffffff",
    "axes.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "phase-jax",
    "figure.dpi": 110,
    "savefig.dpi": 160,
}
PANEL_WIDTH = 4.7  # inches: one panel on a phone, two beside each other on a desk


def style_of(protocol: str) -> dict:
    """Colour and marker of a protocol."""
    return PROTOCOL_STYLE.get(protocol, OTHER_STYLE)


def by_model(reports: Sequence[dict]) -> dict[str, list[dict]]:
    """Reports grouped by model, in the order in which models first occur."""
    groups: dict[str, list[dict]] = {}
    for report in reports:
        groups.setdefault(report["model"], []).append(report)
    return groups


def draw_band(axes: Axes, places: np.ndarray, band: Band, style: Mapping, **line) -> None:
    """A curve with its 95 % band."""
    if band.low is not None:
        axes.fill_between(places, band.low, band.high, color=style["color"], alpha=0.18, linewidth=0)
    axes.plot(places, band.value, **{"linewidth": 1.4, "markersize": 3, **style, **line})


def draw_boundaries(axes: Axes, residues: int, stride: int | None) -> None:
    """A line wherever a stride begins."""
    for boundary in range(0, residues + 1, stride) if stride else ():
        axes.axvline(boundary - 0.5, color=COLORS["rule"], linewidth=0.7, zorder=0)


def draw_extremes(axes: Axes, report: Mapping) -> None:
    """The mean as a dashed line, the worst residue ringed."""
    color = style_of(report["protocol"])["color"]
    axes.axhline(report["mean"], color=color, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
    ring = {"fillstyle": "none", "color": COLORS["ink"], "markeredgewidth": 1.1}
    axes.plot(report["worst_residue"], report["worst"], "o", markersize=9, clip_on=False, **ring)


def as_accuracy(axes: Axes, places: int) -> None:
    """Limits and ticks of an accuracy axis over `places` residues or phases: the same everywhere."""
    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlim(-0.7, places - 0.3)
    axes.set_xticks(np.arange(0, places, 1 if places <= 12 else 4))


def draw_accuracy(axes: Axes, reports: Sequence[dict]) -> None:
    """One model's accuracy over residues, a curve a protocol with its 95 % Wilson band; stride boundaries as lines.

    The first report's mean is the dashed line, its worst residue is ringed and named.
    """
    first = reports[0]
    residues = np.arange(first["residues"])
    draw_boundaries(axes, first["residues"], first["S"])
    for report in reports:
        band = Band(report["accuracy"], report["wilson_low"], report["wilson_high"])
        draw_band(axes, residues, band, style_of(report["protocol"]), label=report["protocol"])
    draw_extremes(axes, first)
    period = first["period"] or "none"
    axes.text(
        1.0,
        1.02,
        f"mean {first['mean']:.0%} · worst {first['worst']:.0%} at {first['worst_residue']} · period {period}",
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        fontsize=8,
    )
    axes.set_title(architecture(first), pad=16)
    as_accuracy(axes, first["residues"])


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
            axes.set_xlabel(f"position of the target key, mod {reports[0]['residues']}")
        protocols = {report["protocol"] for report in reports}
        handles, labels = max((axes.get_legend_handles_labels() for axes in grid.flat), key=lambda pair: len(pair[1]))
        if len(protocols) > 1:
            names = [padding(label) for label in labels]
            figure.legend(handles, names, loc="outside upper right", ncols=len(labels), frameon=False)
    return figure


def curve_figure(curves: Curves, report: Mapping, nll_limit: float | None) -> Figure:
    """One model under one protocol: accuracy, and below it NLL where `nll_limit` gives its axis an end.

    Over residues the strides are marked, the mean dashed, the worst ringed. Over phases the boundary phase stands
    apart from those within the window.
    """
    style = style_of(report["protocol"])
    count = len(curves.accuracy.value)
    parts = [(curves.accuracy, "accuracy")] + ([] if curves.nll is None else [(curves.nll, "NLL (nats)")])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PANEL_WIDTH, 1.7 + 1.2 * len(parts)), layout="constrained")
        grid = figure.subplots(len(parts), 1, sharex=True, squeeze=False, height_ratios=[2, 1][: len(parts)])[:, 0]
        for axes, (band, name) in zip(grid, parts, strict=True):
            _draw_places(axes, band, curves, style)
            axes.set_ylabel(name)
        as_accuracy(grid[0], count)
        if len(parts) > 1:
            grid[1].set_ylim(0, nll_limit)
            grid[1].yaxis.set_major_locator(MaxNLocator(3))
        if curves.folded:
            grid[-1].set_xlabel(f"phase of the target key (position mod {count})")
            if curves.boundary:
                grid[0].text(count - 1, 1.03, "boundary", ha="center", va="bottom", fontsize=8, color=COLORS["quiet"])
        else:
            grid[-1].set_xlabel(f"position of the target key, mod {count}")
            draw_extremes(grid[0], report)
        figure.align_ylabels()
    return figure


def _draw_places(axes: Axes, band: Band, curves: Curves, style: Mapping) -> None:
    """A curve over residues or phases, a boundary phase unconnected and on a ground of its own."""
    places = np.arange(len(band.value))
    if not (curves.folded and curves.boundary):
        draw_boundaries(axes, places.size, None if curves.folded else curves.stride)
        draw_band(axes, places, band, style)
        return
    last = places[-1]
    within = Band(*(None if bound is None else bound[:last] for bound in (band.value, band.low, band.high)))
    draw_band(axes, places[:last], within, style)
    axes.axvspan(last - 0.5, last + 0.3, color=COLORS["shade"], linewidth=0, zorder=0)
    if band.low is not None:
        axes.vlines(last, band.low[last], band.high[last], color=style["color"], linewidth=1.4)
    axes.plot(last, band.value[last], **style, markersize=5)


def stack_figure(names: Sequence[str], reports: Sequence[Mapping]) -> Figure:
    """Several models under one protocol on shared axes, one above the other."""
    residues = max(report["residues"] for report in reports)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PANEL_WIDTH, 0.5 + 1.25 * len(reports)), layout="constrained")
        grid = figure.subplots(len(reports), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, name, report in zip(grid, names, reports, strict=True):
            draw_boundaries(axes, report["residues"], report["S"])
            band = Band(report["accuracy"], report["wilson_low"], report["wilson_high"])
            draw_band(axes, np.arange(report["residues"]), band, style_of(report["protocol"]))
            draw_extremes(axes, report)
            axes.set_title(name, fontsize=8.5, pad=4)
            as_accuracy(axes, residues)
            axes.set_yticks([0, 0.5, 1])
        grid[-1].set_xlabel(f"position of the target key, mod {residues}")
        figure.supylabel("accuracy", fontsize=9)
    return figure


def overview_figure(
    names: Sequence[str], groups: Sequence[Sequence[Mapping]], markers: Mapping[str, str], label: str
) -> Figure:
    """Numbers of all models with their 95 % intervals on one axis, a line a protocol.

    `markers` has the fields to show, such as mean or gap, and the marker of each.
    """
    lines = sum(map(len, groups))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PANEL_WIDTH, 0.9 + 0.3 * len(names) + 0.16 * lines), layout="constrained")
        axes = figure.subplots()
        at = 0.0
        for name, group in zip(names, groups, strict=True):
            axes.text(0, at, name, transform=axes.get_yaxis_transform(), va="center", fontweight="bold", fontsize=8.5)
            for report in group:
                at += 1.0
                color = style_of(report["protocol"])["color"]
                for field, marker in markers.items():
                    axes.hlines(at, *report[f"{field}_interval"], color=color, linewidth=1.6, alpha=0.6)
                    axes.plot(report[field], at, marker, color=color, markersize=4.5, clip_on=False)
            axes.axhline(at + 0.8, color=COLORS["rule"], linewidth=0.5)
            at += 1.7
        axes.set_ylim(at - 0.9, -0.8)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel(label)
        axes.grid(axis="x", color=COLORS["rule"], linewidth=0.5)
        axes.set_axisbelow(True)
        axes.spines["left"].set_visible(False)
        axes.set_yticks([])
        protocols = dict.fromkeys(report["protocol"] for group in groups for report in group)
        for protocol in protocols:
            axes.plot([], [], color=style_of(protocol)["color"], linewidth=3, label=padding(protocol))
        figure.legend(loc="outside upper right", ncols=len(protocols), frameon=False)
    return figure


def distance_figure(report: Mapping) -> Figure:
    """Accuracy against the target's distance from the query, the exact branch shaded, and below it where the attention
    of the last position goes, layer by layer (see phase_jax.evaluation.distance.distance_report)."""
    distance, reach, stride = np.array(report["distance"]), report["exact_reach"], report["S"]
    maps = {"exact_of_target": "on the target’s exact tokens"}
    if stride:
        maps = {"entries": "on entries", "entries_of_target": "on the target’s entries", **maps}
    layers = len(report["mass"]["exact"])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PANEL_WIDTH, 2.2 + (0.5 + 0.1 * layers) * len(maps)), layout="constrained")
        top, *rest = figure.subplots(
            1 + len(maps), 1, sharex=True, height_ratios=[2.2, *[0.3 + 0.1 * layers] * len(maps)]
        )
        band = Band(*(np.array(report[name]) for name in ("accuracy", "accuracy_low", "accuracy_high")))
        if stride:
            top.axvspan(distance[0] - 0.5, reach - 0.5, color=COLORS["shade"], linewidth=0, zorder=0)
            top.text(distance[0], 1.03, "exact branch", ha="left", va="bottom", fontsize=8, color=COLORS["quiet"])
            for d in distance[np.array(report["phase"]) == 0]:
                top.axvline(d + 0.5, color=COLORS["rule"], linewidth=0.7, zorder=0)
        draw_band(top, distance, band, PROTOCOL_STYLE["prefix"])
        as_accuracy(top, 0)
        top.set_ylabel("accuracy")
        top.set_title(architecture(report), pad=16)
        for axes, (part, label) in zip(rest, maps.items(), strict=True):
            edges = np.append(distance - 0.5, distance[-1] + 0.5)
            mesh = axes.pcolormesh(
                edges, np.arange(layers + 1) - 0.5, report["mass"][part], vmin=0, vmax=1, cmap="Blues", rasterized=True
            )
            axes.set_title(f"attention {label}", fontsize=8.5, fontweight="normal", pad=3)
            axes.set_ylabel("layer")
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.invert_yaxis()
        figure.colorbar(mesh, ax=rest, format=PercentFormatter(1.0), ticks=[0, 0.5, 1], aspect=8)
        rest[-1].set_xlabel("distance from the query to the target’s key (tokens)")
        top.set_xlim(distance[0] - 0.5, distance[-1] + 0.5)
        top.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return figure


def render(figure: Figure) -> dict[str, bytes]:
    """The figure as {".png": …, ".svg": …}; the same figure gives the same bytes."""
    images = {}
    with matplotlib.rc_context(STYLE):
        for suffix in (".png", ".svg"):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix[1:], metadata={"Date": None} if suffix == ".svg" else None)
            images[suffix] = buffer.getvalue()
    return images


def write(images: Mapping[str, bytes], path: Path) -> list[Path]:
    """Writes what `render` made, each file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix, content in images.items():
        file = path.with_name(path.name + suffix)
        partial = file.with_name(file.name + ".partial")
        partial.write_bytes(content)
        written.append(partial.replace(file))
    return written


def save(figure: Figure, path: Path) -> list[Path]:
    """Writes `path` with .png and .svg; the same figure gives the same bytes."""
    return write(render(figure), path.with_suffix(""))


def inline(svg: bytes, name: str) -> str:
    """An SVG for a page: no background, colours by name (`var(--figure-ink)`), ids that begin with `name`.

    It keeps its proportions and takes the width and the font that the page gives it.
    """
    text = svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 class="plot" aria-hidden="true"', text, count=1)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = text.replace("#ffffff", "none")
    for color, code in COLORS.items():
        text = text.replace(code, f"var(--figure-{color})")
    return text
