"""phase-jax reproduce: the paper's central finding at lab scale, from nothing to a figure."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from configs import lab
from configs.family import FAMILY
from experiments.options import parser, run_with
from phase_jax.data.prompts import PROTOCOLS
from phase_jax.errors import UserError
from phase_jax.run import RunConfig, RunFolder, write_json
from phase_jax.suggest import unknown

CYCLED = (-3, -2, -1, 1, 2, 3)
MODELS = ("full_attn_1kv", "kvc_w4s4_1kv", "kvc_w8s4", "kvc_w8s8_1kv_baseline")


def table(reports: Sequence[dict]) -> Table:
    """The summary as a person reads it, in percent."""
    result = Table("model", "padding", box=box.SIMPLE_HEAD)
    for heading in ("mean", "worst", "gap", "95 % of the gap", "σ", "period", "verdict", "val. loss"):
        result.add_column(heading, justify="right")
    for r in reports:
        percents = [f"{100 * r[name]:.1f}" for name in ("mean", "worst", "gap")]
        low, high = r["gap_interval"]
        period = "none" if r["period"] is None else str(r["period"])
        result.add_row(
            r["model"],
            r["protocol"],
            *percents,
            f"{100 * low:.1f} … {100 * high:.1f}",
            f"{100 * r['sigma']:.1f}",
            period,
            r["verdict"],
            f"{r['validation_loss']:.3f}",
        )
    return result


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "reproduce",
        "Train the lab's models (or continue them), sweep every phase, and show the weak spots: a table, summary.json"
        " and a figure. A second run reuses what is done.",
        "phase-jax reproduce --models full_attn_1kv kvc_w8s8_1kv_baseline --workdir runs/mine",
    )
    arguments.add_argument("--models", nargs="+", default=MODELS, metavar="ID", help="ids of phase-jax configs")
    arguments.add_argument("--steps", type=int, help="training steps (default: the lab's)")
    arguments.add_argument("--logical", type=int, help="logical samples, each on 24 residues (default 1000)")
    arguments.add_argument("--seed", type=int, help="seed of initialisation and training data (default: the id's own)")
    arguments.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=["prefix", "insequence"])
    arguments.add_argument("--workdir", type=Path, default=Path("runs/reproduce"))
    arguments.add_argument(
        "--causal",
        action="store_true",
        help="also knockouts, counterfactual gates, gate profiles, cycling; and the page",
    )
    arguments.add_argument("--quick", action="store_true", help="200 logical samples: the same picture, sooner")
    options = arguments.parse_args(argv)
    for variant in options.models:
        if variant not in FAMILY:
            raise UserError(unknown("model id", variant, FAMILY, "phase-jax configs lists them"))
    logical = options.logical if options.logical is not None else 200 if options.quick else 1000
    if logical < 1:
        raise UserError(f"--logical {logical}: at least one logical sample is needed")

    from experiments.evaluate import evaluate_run
    from experiments.runtime import prepare
    from phase_jax.reports.figures import accuracy_figure, save
    from phase_jax.training.loop import train

    prepare()
    console = Console(stderr=True)
    began = time.perf_counter()
    configs = [lab_run(variant, options.steps, options.seed) for variant in options.models]
    reports = []
    for config in configs:
        folder = RunFolder(options.workdir / config.id)
        done = folder.training.exists()
        result = train(config, folder)
        if done:
            console.print(f"{config.id}: trained before ({result['steps']} steps), reused")
        for protocol in options.protocols:
            report, reused = evaluate_run(folder, protocol, logical)
            if reused:
                console.print(f"{config.id}: {protocol} measured before, reused")
            reports.append(report)
    write_json(options.workdir / "summary.json", {"reports": reports})
    images = save(accuracy_figure(reports), options.workdir / "accuracy")
    Console(width=None if console.is_terminal else 140).print(table(reports))
    if options.causal:
        causal(configs, options.workdir, options.protocols, logical)
    minutes = (time.perf_counter() - began) / 60
    print(f"{options.workdir / 'summary.json'}, {', '.join(map(str, images))}; {minutes:.1f} minutes")
    return 0


def causal(configs: Sequence[RunConfig], workdir: Path, protocols: Sequence[str], logical: int) -> None:
    """Runs every causal tool on the measured runs that it applies to, and makes the page of all that is stored."""
    from experiments import counterfactual, cycle, gates, knockout, report
    from phase_jax.interventions.cycling import check_cycling
    from phase_jax.interventions.gates import check_gates

    console = Console(width=160)
    for config in configs:
        folder, model = RunFolder(workdir / config.id), config.model
        for protocol in protocols:
            console.print(knockout.table(knockout.knockout_run(folder, protocol, logical, controls=3)[0]))
            if _applies(check_gates, model, config.id):
                found, _ = counterfactual.counterfactual_run(folder, protocol, min(logical, counterfactual.LOGICAL))
                console.print(counterfactual.table(found))
                gates.gates_run(folder, protocol, min(logical, gates.LOGICAL))
            if _applies(check_cycling, model, CYCLED, config.id):
                console.print(cycle.cycling_table(cycle.cycle_run(folder, protocol, logical, CYCLED)[0]))
    report.main([str(workdir), "--out", str(workdir / "report.html")])


def _applies(check: Callable, *arguments) -> bool:
    """Whether a tool takes a model: whether its check raises nothing."""
    try:
        check(*arguments)
    except UserError:
        return False
    return True


def lab_run(variant: str, steps: int | None = None, seed: int | None = None) -> RunConfig:
    """The lab's run of an id, with the command line's changes."""
    return run_with(lab.get_config(variant), steps, seed)
