"""What the page shows of gates: the stored numbers, whichever parts of them there are."""

import json

import numpy as np
import pytest

from experiments.cli import main
from phase_jax.reports import figures
from phase_jax.reports.gates import concentration_figure, cycling_figure, drawings, profile_figure
from phase_jax.run import write_json
from phase_jax.statistics import cycling_report, simulate
from tests.reports.lab import write_run

MADE_OF = {"protocol": "prefix", "n_logical": 2, "prompt_seed": 0}


def gates_stored(heads=2, tied=False, losses=True, steps=(100, 200)):
    """As phase-jax gates writes it, of a model W4/S4 with one head in each layer."""
    rng = np.random.default_rng(0)

    def branch(layer):
        mass = rng.dirichlet(np.ones(4))
        numbers = {"static": 1.5 + layer, "per_window": 1.2 + layer, "peak": int(mass.argmax())}
        return {"mass": mass.tolist(), "profile": (4 * mass).tolist(), **numbers}

    found = {"loss_by_phase": [0.31, 0.02, -0.01, 0.0], "specialised": True, "correlation": 0.8, "p_value": 0.2}
    return {
        "model": "m",
        **MADE_OF,
        "steps": list(steps),
        "width": 4,
        "stride": 4,
        "windows": 1234,
        "heads": [
            {
                "layer": layer,
                "head": 0,
                "key": branch(layer),
                "value": None if tied else branch(layer),
                "peak_difference": None if tied else 1,
                "best_shift": None if tied else 1,
                "concentrated": layer == 0,
                "alignment": found if losses and layer == 0 else None,
            }
            for layer in range(heads)
        ],
        "path": {
            name: [[[3.9 if step < steps[-1] else start + layer] for layer in range(heads)] for step in steps]
            for name, start in (("static", 1.5), ("per_window", 1.2))
        },
    }


def cycle_stored(deltas=(-1, 1), stride=4):
    """As phase-jax cycle writes it."""
    rng = np.random.default_rng(1)
    clean = simulate(np.tile(np.linspace(0.1, 0.9, stride), 24 // stride), 30, 0.2, rng)
    rows = [cycling_report(clean, np.roll(clean, delta, axis=1), delta, stride, replicates=50) for delta in deltas]
    curve = clean.reshape(30, -1, stride).mean(axis=(0, 1)).tolist()
    return {"model": "m", **MADE_OF, "stride": stride, "clean": curve, "cycled": rows}


def test_drawings_tell_the_stored_numbers():
    stored = {"gates-prefix": gates_stored(), "cycle-prefix": cycle_stored(), "knockout-prefix": {}}
    cycling, concentration, profiles = drawings(stored)
    assert concentration.rows[1][:3] == ["1.0", "2.50", "2.20"] and "1,234 windows" in concentration.caption
    assert "the most concentrated, 0.0, ends at 1.50 of 4" in concentration.description
    assert [row[:2] for row in profiles.rows[:5]] == [["0.0", str(phase)] for phase in range(4)] + [["1.0", "0"]]
    assert [row[4] for row in profiles.rows[:5]] == ["31.0 points", "2.0 points", "-1.0 points", "0.0 points", "–"]
    assert "rank correlation with the knockout's loss 0.80, p 0.200" in profiles.description
    row = stored["cycle-prefix"]["cycled"][1]
    assert cycling.rows[4][:2] == ["+1", "0"] and cycling.rows[0][0] == "−1"
    assert cycling.rows[5][2:4] == [f"{100 * row[name][1]:.1f} %" for name in ("predicted", "observed")]
    assert "R² – at δ = +1" in cycling.description, "three phases have no R²"


def test_figures_draw_what_is_stored():
    report = gates_stored()
    (plane,) = concentration_figure(report).axes
    ends = [
        line.get_xydata()[0].tolist()
        for line in plane.lines
        if line.get_fillstyle() == "full" and line.get_marker() == "o"
    ]
    assert ends == [[1.5, 1.2], [2.5, 2.2]]
    with_losses, without = profile_figure(report), profile_figure(gates_stored(losses=False))
    assert len(with_losses.axes) == 4 and len(without.axes) == 2
    bars = [patch.get_height() for axes in with_losses.axes for patch in axes.patches]
    assert bars == pytest.approx([31, 2, -1, 0])
    stored = cycle_stored((-3, -1, 2))
    figure = cycling_figure(stored)
    assert [axes.get_visible() for axes in figure.axes] == [True, True, True, False]
    assert sorted(axes.get_title("left")[:6] for axes in figure.axes if axes.get_visible()) == [
        "δ = +2",
        "δ = −1",
        "δ = −3",
    ]


@pytest.mark.parametrize(
    "report", [gates_stored(heads=1), gates_stored(heads=7, tied=True), gates_stored(losses=False, steps=(9,))]
)
def test_every_kind_of_model_can_be_drawn(report):
    for drawing in drawings({"gates-prefix": report}):
        assert figures.render(drawing.figure)[".png"] and drawing.rows


@pytest.fixture
def run(tmp_path):
    path = write_run(tmp_path / "run", "kvc_w8s8_1kv_baseline", protocols=("prefix",))
    write_json(path / "interventions" / "gates-prefix.json", gates_stored())
    write_json(path / "interventions" / "cycle-prefix.json", cycle_stored())
    return path


def test_the_page_and_the_card_show_them(run, tmp_path):
    out = tmp_path / "report.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    names = {f"kvc_w8s8_1kv_baseline-{name}-prefix" for name in ("concentration", "profiles", "cycling")}
    assert all(f'<figure id="{name}"' in out.read_text() for name in names) and "Inside the model" in out.read_text()
    assert all(f"({out.stem}-figures/{name}.png)" in out.with_suffix(".md").read_text() for name in names)
    workdir = f"--workdir={run} --protocols=prefix --logical=2 --seed=0"
    assert f"phase-jax gates {workdir}\n" in out.read_text()
    assert f"phase-jax cycle {workdir} --delta=-1:1\n" in out.read_text()


def test_a_damaged_result_is_one_line(run, tmp_path, capsys):
    broken = json.loads((run / "interventions" / "cycle-prefix.json").read_text())
    del broken["cycled"][0]["observed"]
    write_json(run / "interventions" / "cycle-prefix.json", broken)
    out = tmp_path / "report.html"
    assert main(["report", str(run), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "interventions" in error and "observed" in error and error.count("\n") == 1 and not out.exists()
