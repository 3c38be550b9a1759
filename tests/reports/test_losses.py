"""The figure of losses shows what it is given."""

from phase_jax.reports.figures import render
from phase_jax.reports.losses import loss_figure

CURVES = {
    "one": {
        "tokens": [2e6, 4e6],
        "validation_loss": [2.0, 1.5],
        "batch_tokens": [1e6, 2e6, 3e6],
        "batch_loss": [3, 2, 1],
    },
    "two": {"tokens": [4e6], "validation_loss": [1.7], "batch_tokens": [4e6], "batch_loss": [1.6]},
}


def test_a_run_is_a_thin_line_of_batches_and_a_marked_one_of_held_out_text():
    (axes,) = loss_figure(CURVES, "nats per byte").axes
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    for i, curve in enumerate(CURVES.values()):
        assert drawn[2 * i] == (curve["batch_tokens"], curve["batch_loss"])
        assert drawn[2 * i + 1] == (curve["tokens"], curve["validation_loss"])
        assert axes.lines[2 * i].get_color() == axes.lines[2 * i + 1].get_color()
    assert axes.lines[0].get_color() != axes.lines[2].get_color()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "two"]
    low, high = axes.get_ylim()
    assert low < 1.0 and 2.0 < high < 3.0


def test_the_same_losses_give_the_same_bytes():
    assert render(loss_figure(CURVES, "nats")) == render(loss_figure(CURVES, "nats"))
