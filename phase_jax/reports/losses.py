"""Loss against tokens, of several runs side by side."""

import itertools
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.figure import Figure

from phase_jax.reports.figures import COLORS, STYLE

_LINES = (("prefix", "o"), ("insequence", "s"), ("target", "^"), ("other", "D"))  # colour and marker


def loss_figure(curves: Mapping[str, Mapping[str, Sequence[float]]], unit: str) -> Figure:
    """One line a run: loss on held-out text, with markers, and on the batches trained on, thin, against tokens seen.

    A curve has `tokens` and `validation_loss`, and `batch_tokens` and `batch_loss`; `unit` is that of the losses.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.4), layout="constrained")
        axes = figure.subplots()
        for (name, curve), (color, marker) in zip(curves.items(), itertools.cycle(_LINES), strict=False):
            look = {"color": COLORS[color]}
            axes.plot(curve["batch_tokens"], curve["batch_loss"], linewidth=0.6, alpha=0.55, **look)
            axes.plot(curve["tokens"], curve["validation_loss"], marker=marker, markersize=3.5, label=name, **look)
        held_out, batches = (
            [loss for curve in curves.values() for loss in curve[name]] for name in ("validation_loss", "batch_loss")
        )
        axes.set_ylim(0.95 * min(held_out + batches), 1.05 * max(held_out))  # the first batches' losses are above
        axes.set_xlim(0)
        axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1e6:g}M")
        axes.set_xlabel("tokens trained on")
        axes.set_ylabel(f"loss, {unit}")
        axes.legend(frameon=False, title="held out (thin: training batches)", alignment="left")
    return figure
