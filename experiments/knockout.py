"""phase-jax knockout: which heads a trained model loses its answers with, and at which phases."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.evaluate import SEED, once, run_prompts, trained
from experiments.options import parser
from phase_jax.data.prompts import PROTOCOLS, RESIDUES, PhasePrompts
from phase_jax.errors import UserError
from phase_jax.run import RunConfig, RunFolder

CALIBRATION_SEED = 1_000_000  # far from the seeds that people give evaluations
CALIBRATION = 48  # logical samples, each on 24 residues
MEANS = ("all", "phase")


def knockout_run(
    folder: RunFolder,
    protocol: str,
    logical: int,
    seed: int = SEED,
    *,
    calibration: int = CALIBRATION,
    calibration_seed: int = CALIBRATION_SEED,
    means: str = "all",
    sets: Sequence[str] = (),
    band: int = 1,
    controls: int = 0,
) -> tuple[dict, bool]:
    """(report, whether it was there already) of all knockouts of a run, stored as interventions/knockout-<protocol>.

    `means` is `all` (the mean over all calibration prompts) or `phase` (over those of the target's phase). Raises
    UserError where the run is not trained, a head or position does not exist, or calibration prompts are evaluated.
    """
    config = trained(folder)
    made_of = {
        "protocol": protocol,
        "n_logical": logical,
        "prompt_seed": seed,
        "means": means,
        "sets": list(sets),
        "band": band,
        "controls": controls,
        "calibration_seed": calibration_seed,
        "calibration_logical": calibration,
    }

    from phase_jax.interventions import knockout as tool

    heads = [tool.parse_heads(text, config.model) for text in sets]
    plan = tool.knockouts(config.model, config.data.length, heads, band, controls)
    phases = _phases(config, means)

    def measured(journal: Path) -> tuple[dict, dict]:
        from phase_jax.model import Transformer
        from phase_jax.training.loop import load_params

        prompts = run_prompts(config, protocol, logical, seed)
        others = calibration_prompts(config, protocol, calibration, calibration_seed, prompts.tokens, seed)
        model, params, label = Transformer(config.model), load_params(config, folder), f"{config.id} {protocol}"
        said = tool.calibrate(model, params, others, band, phases, f"{label} calibration")
        scores = tool.measure(model, params, prompts, config.data.vocabulary, plan, said, f"{label} knockouts", journal)
        report = {
            "model": config.id,
            "W": config.model.window,
            "S": config.model.stride,
            "kv_heads": config.model.kv_heads,
            "layers": config.model.layers,
            "residues": RESIDUES,
            **made_of,
            "calibration_prompts": calibration * RESIDUES,
            "calibration_sha256": tool.digest(others.tokens),
            **tool.knockout_report(scores, plan, config.model),
        }
        kept = {name: scores[name] for name in ("correct", "nll")}
        return report, {**kept, "target_position": prompts.target_position, "means": said}

    return once(folder.intervention(f"knockout-{protocol}"), made_of, measured)


def calibration_prompts(
    config: RunConfig, protocol: str, logical: int, seed: int, evaluated: np.ndarray, evaluation_seed: int
) -> PhasePrompts:
    """Prompts of another stream than the `evaluated` ones [n, R, T]. Raises UserError where they are of the same."""
    from phase_jax.interventions.knockout import check_disjoint

    if logical < 1:
        raise UserError(f"--calibration {logical}: at least one logical sample is needed")
    if seed == evaluation_seed:
        raise UserError(f"--calibration-seed {seed} is the seed of the evaluation, too: choose another")
    prompts = run_prompts(config, protocol, logical, seed)
    check_disjoint(prompts.tokens, evaluated)
    return prompts


def _phases(config: RunConfig, means: str) -> int:
    """How many means there are. Raises UserError where phases are asked for and do not exist."""
    if means == "all":
        return 1
    if config.model.stride is None:
        raise UserError(f"--means phase: {config.id} has full attention, and so no phases; use --means all")
    return config.model.stride


def table(report: dict) -> Table:
    """Every knockout of a run, a line each, in percent."""
    clean = report["clean"]
    title = (
        f"{report['model']}, {report['protocol']} padding, {report['n_logical']} logical samples: without knockout mean"
        f" {100 * clean['mean']:.1f}, worst {100 * clean['worst']:.1f}, gap {100 * clean['gap']:.1f}"
    )
    result = Table("knockout", title=title, box=box.SIMPLE_HEAD)
    for heading in ("mean", "95 %", "worst", "gap", "NLL", "p (same share)", "p (same points)", "phases", "lost"):
        result.add_column(heading, justify="right")
    for entry in report["knockouts"]:
        low, high = entry["mean_interval"]
        phases = entry["loss_phases"]
        share = entry["p_relative"]
        result.add_row(
            entry["name"],
            f"{100 * entry['mean']:+.1f}",
            f"{100 * low:+.1f} … {100 * high:+.1f}",
            *(f"{100 * entry[name]:+.1f}" for name in ("worst", "gap")),
            f"{entry['nll']:+.2f}",
            "–" if share is None else f"{share:.4f}",
            f"{entry['p_loss']:.4f}",
            "–" if phases is None else f"{phases:.1f}",
            " ".join(f"{100 * loss:.0f}" for loss in entry["loss_by_phase"]) if report["S"] else "",
        )
    return result


def measure_all(
    name: str,
    arguments: argparse.ArgumentParser,
    argv: Sequence[str],
    run: Callable[..., tuple[dict, bool]],
    table: Callable[[dict], Table],
    width: int,
) -> int:
    """A verb that measures runs against calibration prompts: parses, and prints a table for each run and padding."""
    arguments.add_argument(
        "--calibration", type=int, default=CALIBRATION, metavar="N", help="logical samples (default %(default)s)"
    )
    arguments.add_argument("--calibration-seed", type=int, default=CALIBRATION_SEED, help="seed of these prompts")
    options = vars(arguments.parse_args(argv))

    from experiments.runtime import prepare

    prepare()
    console = Console(width=None if sys.stdout.isatty() else width)
    paths, protocols = options.pop("workdir"), options.pop("protocols")
    for folder in map(RunFolder, paths):
        for protocol in protocols:
            report, reused = run(folder, protocol, **options)
            console.print(table(report))
            where = folder.intervention(f"{name}-{protocol}").with_suffix(".json")
            print(f"{where}{' (measured before)' if reused else ''}", flush=True)
    return 0


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "knockout",
        "Replace what heads say at the last position by what they say on average, one KV head at a time, and measure"
        " what is lost at every residue. One prefill of each prompt serves all knockouts.",
        "phase-jax knockout --workdir runs/w8s8 --sets 0.0+1.0 --controls 5",
    )
    arguments.add_argument("--workdir", type=Path, nargs="+", required=True, help="folders of runs")
    arguments.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=["prefix", "insequence"])
    arguments.add_argument("--logical", type=int, default=1000, metavar="N", help="logical samples (default 1000)")
    arguments.add_argument("--seed", type=int, default=SEED, help="seed of the prompts")
    arguments.add_argument(
        "--sets", nargs="+", default=[], metavar="L.K+L.K", help="also these KV heads together (layer.head, from 0)"
    )
    arguments.add_argument(
        "--band", type=int, default=1, metavar="P", help="whole layers are replaced at the last P positions (default 1)"
    )
    arguments.add_argument(
        "--controls", type=int, default=0, metavar="N", help="also N random choices of as many query heads"
    )
    arguments.add_argument(
        "--means", choices=MEANS, default="all", help="over all calibration prompts, or those of the target's phase"
    )
    return measure_all("knockout", arguments, argv, knockout_run, table, 160)
