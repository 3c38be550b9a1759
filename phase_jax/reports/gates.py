"""Figures and tables of a run's gates: where they look, how they came to, and what moving them does (SPEC §7).

Made from what `phase-jax gates` and `phase-jax cycle` stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from phase_jax.reports import figures, wording
from phase_jax.reports.curves import Band
from phase_jax.reports.figures import COLORS, PANEL_WIDTH, STYLE

MOST_PROFILES = 6  # heads whose profiles are drawn, the most concentrated first
KEY = {"color": COLORS["other"], "marker": "o", "markersize": 3}
VALUE = {"color": COLORS["target"], "marker": "s", "markersize": 3, "linestyle": "--"}


class Drawing(NamedTuple):
    """A figure, what it says in words, and its numbers."""

    name: str
    caption: str
    description: str
    figure: Figure
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def drawings(interventions: Mapping[str, Mapping]) -> Iterator[Drawing]:
    """The drawings of a run's stored interventions, by their names; those of other kinds are passed over."""
    for name, report in sorted(interventions.items()):
        if name.startswith("gates-"):
            yield _concentration(report)
            yield _profiles(report)
        elif name.startswith("cycle-"):
            yield _cycling(report)


def head_name(head: Mapping) -> str:
    """`LAYER.HEAD`, as knockouts name heads."""
    return f"{head['layer']}.{head['head']}"


def _of_branches(head: Mapping, *fields: str) -> list:
    """These numbers of the key gate and then of the value gate, None where values are keys."""
    return [head[branch][field] if head[branch] else None for branch in ("key", "value") for field in fields]


def _concentration(report: Mapping) -> Drawing:
    steps, heads = report["steps"], report["heads"]
    way = f"over {len(steps)} checkpoints" if len(steps) > 1 else f"at step {steps[-1]}"
    closest = min(heads, key=lambda head: head["key"]["static"])
    return Drawing(
        f"concentration-{report['protocol']}",
        f"concentration of the key gates {way} ({report['windows']:,} windows)",
        f"Static and per-window effective offsets of {len(heads)} key gates of {report['model']} {way}; the most"
        f" concentrated, {head_name(closest)}, ends at {closest['key']['static']:.2f} of {report['width']} offsets.",
        concentration_figure(report),
        ["head", "K static", "K per window", "V static", "V per window", "K peak offset", "V peak offset"],
        [
            [
                head_name(head),
                *map(wording.number, _of_branches(head, "static", "per_window")),
                *(wording.number(peak, 0) for peak in _of_branches(head, "peak")),
            ]
            for head in heads
        ],
    )


def concentration_figure(report: Mapping) -> Figure:
    """The plane of static and per-window effective offsets: each key gate's path over training, its end filled."""
    width = report["width"]
    static, per_window = (np.array(report["path"][name]) for name in ("static", "per_window"))  # [steps, L, K]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PANEL_WIDTH, PANEL_WIDTH), layout="constrained")
        axes = figure.subplots()
        axes.plot([1, width], [1, width], color=COLORS["rule"], linewidth=0.7, zorder=0)
        for head in report["heads"]:
            x, y = (values[:, head["layer"], head["head"]] for values in (static, per_window))
            color = KEY["color"] if head["concentrated"] else COLORS["quiet"]
            axes.plot(x, y, color=color, linewidth=1, alpha=0.7)
            axes.plot(x[0], y[0], "o", color=color, fillstyle="none", markersize=4.5)
            axes.plot(x[-1], y[-1], "o", color=color, markersize=5.5)
            axes.annotate(head_name(head), (x[-1], y[-1]), (5, -9), textcoords="offset points", fontsize=8)
        axes.set_aspect("equal")
        axes.set_xlim(1 - 0.03 * width, 1.03 * width)
        axes.set_ylim(1 - 0.03 * width, 1.03 * width)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))  # "1.0" is the name of a head
        axes.set_xlabel("static: effective offsets of the mean gate")
        axes.set_ylabel("per window: mean effective offsets")
    return figure


def _profiles(report: Mapping) -> Drawing:
    heads = _shown(report)
    rows = [
        [head_name(head), str(phase), wording.number(key), wording.number(value), wording.points(loss)]
        for head in heads
        for phase, (key, value, loss) in enumerate(zip(*_curves(head, report["stride"]), strict=True))
    ]
    return Drawing(
        f"profiles-{report['protocol']}",
        "gate profiles" + (" and knockout losses" if _losses(heads) else ""),
        " ".join(map(_profile_sentence, heads)),
        profile_figure(report),
        ["head", "phase", "K profile", "V profile", "lost in a knockout"],
        rows,
    )


def _shown(report: Mapping) -> list[Mapping]:
    return sorted(report["heads"], key=lambda head: head["key"]["static"])[:MOST_PROFILES]


def _losses(heads: Sequence[Mapping]) -> list[list[float]]:
    return [head["alignment"]["loss_by_phase"] for head in heads if head["alignment"]]


def _curves(head: Mapping, stride: int) -> list[list]:
    """Profiles of key and value gate, and the knockout's losses; None at every phase of what is not there."""
    nothing = [None] * stride
    key, value = (profile or nothing for profile in _of_branches(head, "profile"))
    return [key, value, *(_losses([head]) or [nothing])]


def _profile_sentence(head: Mapping) -> str:
    profile, found = head["key"]["profile"], head["alignment"]
    best = int(np.argmax(profile))
    sentence = f"Head {head_name(head)}: the key gate has {profile[best]:.1f} times its uniform share at phase {best}"
    if found is None or found["correlation"] is None:
        return sentence + "."
    p_value = wording.p_value(found["p_value"])
    return f"{sentence}; rank correlation with the knockout's loss {found['correlation']:.2f}, p {p_value}."


def profile_figure(report: Mapping) -> Figure:
    """Profiles of the most concentrated heads' gates over phases, each above the points that its knockout loses."""
    heads, stride = _shown(report), report["stride"]
    losses = _losses(heads)
    tallest = max(max(profile) for head in heads for profile in _of_branches(head, "profile") if profile)
    columns, parts = min(2, len(heads)), 2 if losses else 1
    lines = -(-len(heads) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PANEL_WIDTH, (1 + 0.9 * parts) * lines + 0.5), layout="constrained")
        grid = figure.subplots(parts * lines, columns, sharex=True, squeeze=False, height_ratios=[2, 1][:parts] * lines)
        panels = grid.reshape(lines, parts, columns).swapaxes(1, 2).reshape(-1, parts)
        for (top, *below), head in zip(panels, heads, strict=False):
            key, value, loss = _curves(head, stride)
            top.axhline(1, color=COLORS["rule"], linewidth=0.7)
            top.plot(key, **KEY, linewidth=1.4, label="key gate")
            if head["value"]:
                top.plot(value, **VALUE, linewidth=1.2, label="value gate")
            top.set_title(f"head {head_name(head)}", fontsize=8.5, pad=4)
            top.set_ylim(0, 1.08 * tallest)
            for axes in below:
                if head["alignment"]:
                    axes.bar(np.arange(stride), 100 * np.array(loss), color=COLORS["ink"], width=0.6)
                axes.set_ylim(min(0, 105 * np.min(losses)), max(5, 105 * np.max(losses)))
        for axes in panels[len(heads) :].flat:
            axes.set_visible(False)
        for part, label in enumerate(("gate / uniform", "points lost")[:parts]):
            for axes in grid[part::parts, 0]:
                axes.set_ylabel(label)
        for axes in grid[-1]:
            axes.set_xlabel("phase")
            axes.set_xticks(range(stride))
        figure.align_ylabels()
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)
    return figure


def _cycling(report: Mapping) -> Drawing:
    fits = [f"R² {wording.number(row['r2x'])} at δ = {wording.signed(row['delta'])}" for row in report["cycled"]]
    return Drawing(
        f"cycling-{report['protocol']}",
        f"{wording.padding(report['protocol'])}, gates cycled by δ",
        f"Accuracy over phases of {report['model']} with its gates cycled by δ, observed and predicted. Without the"
        f" boundary phase, {wording.listed(fits)}.",
        cycling_figure(report),
        ["δ", "phase", "predicted", "observed", "95 % interval"],
        [
            [wording.signed(row["delta"]), str(phase), *map(wording.percent, values), wording.percents(bounds)]
            for row in report["cycled"]
            for phase, (*values, bounds) in enumerate(
                zip(row["predicted"], row["observed"], zip(*row["observed_interval"], strict=True), strict=True)
            )
        ],
    )


def cycling_figure(report: Mapping) -> Figure:
    """Observed against predicted accuracy over phases, a panel a δ; the boundary's old and new phase are shaded."""
    cycled = report["cycled"]
    columns = min(2, len(cycled))
    lines = -(-len(cycled) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PANEL_WIDTH, 1.75 * lines + 0.6), layout="constrained")
        grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        panels = grid.T.ravel()
        for axes, row in zip(panels, cycled, strict=False):
            _draw_cycled(axes, row, report)
        for axes in panels[len(cycled) :]:
            axes.set_visible(False)
        for axes in grid[-1]:
            axes.set_xlabel("phase of the target key")
        grid[0, 0].set_ylim(bottom=-0.02)  # the axes are shared
        grid[0, 0].yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        grid[0, 0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        figure.supylabel("accuracy", fontsize=9)
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False)
    return figure


def _draw_cycled(axes: Axes, row: Mapping, report: Mapping) -> None:
    stride, delta = report["stride"], row["delta"]
    for boundary in {stride - 1, (stride - 1 + delta) % stride}:
        axes.axvspan(boundary - 0.5, boundary + 0.5, color=COLORS["shade"], linewidth=0, zorder=0)
    axes.plot(report["clean"], color=COLORS["rule"], linewidth=1.2, label="not cycled")
    ring = {"color": COLORS["ink"], "marker": "o", "fillstyle": "none", "markersize": 4, "linestyle": "--"}
    axes.plot(row["predicted"], **ring, linewidth=0.9, label="predicted")
    observed = Band(np.array(row["observed"]), *np.array(row["observed_interval"]))
    figures.draw_band(axes, np.arange(stride), observed, figures.style_of(report["protocol"]), label="observed")
    axes.set_title(f"δ = {wording.signed(delta)}   R² {wording.number(row['r2x'])}", fontsize=8.5, pad=4)
    axes.set_xlim(-0.7, stride - 0.3)
    axes.set_xticks(range(stride))
