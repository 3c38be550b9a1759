"""phase-jax cycle: move the gates by some offsets and see whether the accuracy curve follows."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.evaluate import SEED, once, run_prompts, stored, trained
from experiments.options import parser
from phase_jax.data.prompts import PROTOCOLS
from phase_jax.errors import UserError
from phase_jax.run import RunFolder


def cycle_run(
    folder: RunFolder, protocol: str, logical: int, deltas: Sequence[int], seed: int = SEED
) -> tuple[dict, bool]:
    """(report, whether it was there already) of cycling by every δ, stored as interventions/cycle-<protocol>.

    Other δ that were measured before on the same prompts are kept. Raises UserError where the run is not trained, its
    gates cannot cycle, or a size is impossible.
    """
    config = trained(folder)

    from phase_jax.interventions.cycling import check_cycling, cycle_gates

    check_cycling(config.model, deltas, config.id)
    width, stride = config.model.window, config.model.stride
    made_of = {"protocol": protocol, "n_logical": logical, "prompt_seed": seed}
    target, clean = folder.intervention(f"cycle-{protocol}"), folder.evaluation(protocol)
    before = stored(target, made_of)
    deltas = sorted({*deltas, *(row["delta"] for row in (before or {"cycled": ()})["cycled"])})

    def measured(journal: Path) -> tuple[dict, dict]:
        from phase_jax.evaluation.sweep import sweep
        from phase_jax.model import Transformer
        from phase_jax.statistics import cycling_report, fold
        from phase_jax.training.loop import load_params

        prompts = run_prompts(config, **made_of)
        model, params = Transformer(config.model), load_params(config, folder)
        # By δ mod W: gates that are W offsets apart are the same.
        correct = {int(name) % width: values for name, values in _arrays(target).items()} if before else {}
        if 0 not in correct and stored(clean, made_of):
            correct[0] = _arrays(clean)["correct"]
        for delta in (0, *deltas):
            if delta % width not in correct:
                label, cycled = f"{config.id} {protocol} δ = {delta:+}", cycle_gates(params, delta)
                scores = sweep(model, cycled, prompts, config.data.vocabulary, label, journal)
                correct[delta % width] = scores["correct"]
        report = {
            "model": config.id,
            **made_of,
            "deltas": deltas,
            "stride": stride,
            "map_sharing": config.model.map_sharing,
            "clean": fold(correct[0], stride).mean(axis=0).tolist(),
            "cycled": [cycling_report(correct[0], correct[delta % width], delta, stride) for delta in deltas],
        }
        return report, {f"{delta:+}": correct[delta % width] for delta in (0, *deltas)}

    return once(target, {**made_of, "deltas": deltas}, measured)


def _arrays(target: Path) -> dict[str, np.ndarray]:
    with np.load(target.with_suffix(".npz")) as arrays:
        return dict(arrays)


def delta_range(text: str) -> list[int]:
    """The whole numbers of `-3:3`, ends included and 0 left out, or one number. Raises UserError for other text."""
    try:
        ends = [int(part) for part in text.split(":")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2):
        raise UserError(f"--delta {text}: give a whole number or a range of them, such as -3:3")
    deltas = [delta for delta in range(ends[0], ends[-1] + 1) if delta]
    if not deltas:
        raise UserError(f"--delta {text}: no offset to move the gates by; the smaller end comes first, as in -3:3")
    return deltas


def cycling_table(report: dict) -> Table:
    """What cycling did, a line a δ."""
    title = f"{report['model']}, {report['protocol']}: accuracy where the gates were cycled by δ"
    result = Table("δ", title=title, box=box.SIMPLE_HEAD)
    for heading in (
        *("mean", "R² all", "R² without S − 1", "R² interior", "error interior"),
        *("best interior phase", "of the predicted accuracy"),
    ):
        result.add_column(heading, justify="right")
    for row in report["cycled"]:
        best = row["best"]
        cells = [_interval(row, name) for name in ("r2a", "r2x", "r2i")]
        error = "–" if row["maeI"] is None else f"{100 * row['maeI']:.1f}"
        where = "–" if best is None else f"{best['observed_phase']} (predicted {best['predicted_phase']})"
        share = "–" if best is None else f"{100 * best['share']:.0f} %"
        result.add_row(f"{row['delta']:+}", f"{100 * row['mean']:.1f}", *cells, error, where, share)
    return result


def _interval(row: dict, name: str) -> str:
    if row[name] is None:
        return "–"
    bounds = row[f"{name}_interval"]
    return f"{row[name]:.2f}" + ("" if bounds is None else f" ({bounds[0]:.2f}–{bounds[1]:.2f})")


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "cycle",
        "Cycle the gates of a trained model with W = S by δ offsets, payload maps staying as they are, and sweep all"
        " phases again: phase r should do as phase r − δ did.",
        "phase-jax cycle --workdir=runs/w8s8 --delta -3:3",
    )
    arguments.add_argument("--workdir", type=Path, nargs="+", required=True, help="folders of runs")
    arguments.add_argument("--delta", default="-3:3", metavar="FROM:TO", help="offsets to cycle by (default -3:3)")
    arguments.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=["prefix", "insequence"])
    arguments.add_argument("--logical", type=int, default=1000, metavar="N", help="logical samples (default 1000)")
    arguments.add_argument("--seed", type=int, default=SEED, help="seed of the prompts")
    options = arguments.parse_args(_joined(argv))
    deltas = delta_range(options.delta)

    from experiments.runtime import prepare

    prepare()
    console = Console(width=None if sys.stdout.isatty() else 140)
    for folder in map(RunFolder, options.workdir):
        for protocol in options.protocols:
            report, reused = cycle_run(folder, protocol, options.logical, deltas, options.seed)
            console.print(cycling_table(report))
            where = folder.intervention(f"cycle-{protocol}").with_suffix(".json")
            print(f"{where}{' (measured before)' if reused else ''}", flush=True)
    return 0


def _joined(argv: Sequence[str]) -> list[str]:
    """`--delta -3:3` as `--delta=-3:3`: argparse takes a value that begins with a minus sign for an option."""
    joined = []
    for argument in argv:
        if joined and joined[-1] == "--delta":
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined
