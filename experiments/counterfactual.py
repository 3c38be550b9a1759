"""phase-jax counterfactual: how much of a trained model's gap each cause carries."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from experiments.evaluate import SEED, once, run_prompts, trained
from experiments.knockout import CALIBRATION, CALIBRATION_SEED, calibration_prompts, measure_all
from experiments.options import parser
from phase_jax.data.prompts import PROTOCOLS, RESIDUES
from phase_jax.run import RunFolder

LOGICAL = 240  # samples, each on 24 residues under ten conditions


def counterfactual_run(
    folder: RunFolder,
    protocol: str,
    logical: int,
    seed: int = SEED,
    *,
    calibration: int = CALIBRATION,
    calibration_seed: int = CALIBRATION_SEED,
) -> tuple[dict, bool]:
    """(report, whether it was there already) of a run's causes, stored as interventions/counterfactual-<protocol>.

    Raises UserError where the run is not trained, has no learned gates, or calibration prompts are evaluated.
    """
    config = trained(folder)

    from phase_jax.interventions import counterfactual as tool
    from phase_jax.interventions.gates import check_gates
    from phase_jax.interventions.knockout import digest

    check_gates(config.model, config.id)
    made_of = {
        "protocol": protocol,
        "n_logical": logical,
        "prompt_seed": seed,
        "calibration_seed": calibration_seed,
        "calibration_logical": calibration,
    }

    def measured(journal: Path) -> tuple[dict, dict]:
        from phase_jax.model import Transformer
        from phase_jax.training.loop import load_params

        prompts = run_prompts(config, protocol, logical, seed)
        others = calibration_prompts(config, protocol, calibration, calibration_seed, prompts.tokens, seed)
        model, params = Transformer(config.model), load_params(config, folder)
        means = tool.mean_gates(model, params, others)
        label = f"{config.id} {protocol} counterfactual"
        scores = tool.measure(model, params, prompts, config.data.vocabulary, means, label, journal)
        report = {
            "model": config.id,
            "W": config.model.window,
            "S": config.model.stride,
            "kv_heads": config.model.kv_heads,
            "residues": RESIDUES,
            **made_of,
            "calibration_sha256": digest(others.tokens),
            **tool.counterfactual_report(scores, config.model),
        }
        kept = {name: scores[name] for name in ("correct", "nll")}
        return report, {**kept, "target_position": prompts.target_position}

    return once(folder.intervention(f"counterfactual-{protocol}"), made_of, measured)


def table(report: dict) -> Table:
    """The causes of a run's gap, a line each, in points."""
    from phase_jax.reports.counterfactual import HEADINGS, rows

    clean = report["conditions"]["clean"]
    title = (
        f"{report['model']}, {report['protocol']} padding, {report['n_logical']} logical samples: mean"
        f" {100 * clean['mean']:.1f}, gap {100 * clean['gap']:.1f}"
    )
    result = Table(HEADINGS[0], title=title, box=box.SIMPLE_HEAD)
    for heading in HEADINGS[1:]:
        result.add_column(heading, justify="right")
    for row in rows(report):
        result.add_row(*row)
    return result


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "counterfactual",
        "Take away one cause of a gap after the other (the boundary, what gates decide by their tokens, what they do to"
        " all windows alike, payload maps of each offset) and measure how much of the gap goes with it.",
        "phase-jax counterfactual --workdir runs/w8s8 --protocols prefix",
    )
    arguments.add_argument("--workdir", type=Path, nargs="+", required=True, help="folders of runs")
    arguments.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=["prefix", "insequence"])
    arguments.add_argument(
        "--logical", type=int, default=LOGICAL, metavar="N", help="logical samples (default %(default)s)"
    )
    arguments.add_argument("--seed", type=int, default=SEED, help="seed of the prompts")
    return measure_all("counterfactual", arguments, argv, counterfactual_run, table, 140)
