"""phase-jax sweep: many models and seeds, a folder each, and one table."""

import shlex
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from configs.family import FAMILY
from experiments.evaluate import evaluate_run, summary_line
from experiments.options import parser, run_config, split_config
from phase_jax.data.prompts import PROTOCOLS
from phase_jax.errors import UserError
from phase_jax.run import RunConfig, RunFolder, read_json, write_json

CONFIG = "configs/lab.py"
STEPS = 9  # of each kind, timed by --vmap-seeds


def run_folder(workdir: Path, config: RunConfig) -> RunFolder:
    """Where a run of a sweep lies."""
    return RunFolder(workdir / config.id / f"seed{config.seed}")


def runs_by_id(
    changes: Sequence[str], ids: Sequence[str], seeds: Sequence[int] | None
) -> list[list[tuple[RunConfig, list[str]]]]:
    """For each id the runs of all seeds (by default its own alone), each with the arguments of phase-jax train.

    `changes` may name another `--config=FILE.py` than CONFIG. Raises UserError for a seed that is named twice, and as
    `run_config` does.
    """
    if seeds and len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {' '.join(map(str, seeds))}: name each once")
    path = next((a.removeprefix("--config=") for a in changes if a.startswith("--config=")), CONFIG)
    more = [argument for argument in changes if not argument.startswith("--config=")]
    groups = [
        [[f"--config={path}:{variant}", *more, *([] if s is None else [f"--config.seed={s}"])] for s in seeds or [None]]
        for variant in ids
    ]
    return [[(run_config(arguments), arguments) for arguments in group] for group in groups]


def reports_of(workdir: Path) -> list[dict]:
    """Every phase report that a sweep's folder holds, with the seed of its run, by id and seed."""
    reports = []
    for file in sorted(workdir.glob("*/seed*/evaluations/*.json")):
        report = read_json(file)
        if report.get("protocol") in PROTOCOLS:
            reports.append({**report, "seed": RunFolder(file.parents[1]).read_config().seed})
    order = list(FAMILY)
    return sorted(reports, key=lambda r: (order.index(r["model"]), PROTOCOLS.index(r["protocol"]), r["seed"]))


def summary(reports: Sequence[dict]) -> list[dict]:
    """One row for each model and padding: its numbers by seed, and whether each seed's period is the stride."""
    rows: dict[tuple[str, str], dict] = {}
    for r in reports:
        row = rows.setdefault(
            (r["model"], r["protocol"]),
            {"model": r["model"], "protocol": r["protocol"], "S": r["S"], "n_logical": r["n_logical"]}
            | {name: [] for name in ("seeds", "mean", "worst", "gap", "gap_interval", "period", "verdict")}
            | {"validation_loss": []},
        )
        row["seeds"].append(r["seed"])
        for name in ("mean", "worst", "gap", "gap_interval", "period", "verdict", "validation_loss"):
            row[name].append(r[name])
    return list(rows.values())


def table(rows: Sequence[dict]) -> Table:
    """The summary as a person reads it: percent, a number a seed."""
    result = Table("model", "padding", "seeds", box=box.SIMPLE_HEAD)
    for heading in ("mean", "worst", "gap", "period", "stride", "verdict", "val. loss"):
        result.add_column(heading, justify="right")
    for row in rows:
        percents = [" ".join(f"{100 * value:.0f}" for value in row[name]) for name in ("mean", "worst", "gap")]
        result.add_row(
            row["model"],
            row["protocol"],
            " ".join(map(str, row["seeds"])),
            *percents,
            " ".join("–" if period is None else str(period) for period in row["period"]),
            "–" if row["S"] is None else str(row["S"]),
            ", ".join(dict.fromkeys(row["verdict"])),
            " ".join(f"{loss:.2f}" for loss in row["validation_loss"]),
        )
    return result


def together_over_apart(configs: Sequence[RunConfig]) -> float:
    """Seconds of a step of all seeds in one call over those of a call for each: medians of STEPS that take turns."""
    import jax
    import jax.numpy as jnp

    from phase_jax.data.recall import batch_for_step
    from phase_jax.model import Transformer
    from phase_jax.training.optimizer import make_optimizer
    from phase_jax.training.step import init_state, make_train_step

    config = configs[0]
    model, optimizer = Transformer(config.model), make_optimizer(config.train.optimizer, config.train.steps)
    alone = make_train_step(model, optimizer, config.train.first_layer_weight)
    together = jax.jit(jax.vmap(alone), donate_argnums=0)
    keys = [jax.random.key(other.seed) for other in configs]
    states = [jax.jit(partial(init_state, model, optimizer))(key) for key in keys]
    last = config.train.steps - 1
    batches = [batch_for_step(config.data, config.train.batch, last, config.train.steps, key) for key in keys]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    seconds: dict[str, list[float]] = {"together": [], "apart": []}
    for _ in range(STEPS + 1):
        began = time.perf_counter()
        stacked, metrics = together(stacked, batch)
        jax.block_until_ready(metrics)
        between = time.perf_counter()
        for i, own in enumerate(batches):
            states[i], metrics = alone(states[i], own)
            jax.block_until_ready(metrics)
        seconds["together"].append(between - began)
        seconds["apart"].append(time.perf_counter() - between)
    both = {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first compiles
    return both["together"] / both["apart"]


def launch_line(config: RunConfig, arguments: Sequence[str], workdir: Path) -> str:
    """The command that trains a run on a TPU pod: on all hosts at once, one process a host."""
    train = shlex.join(["phase-jax", "train", *arguments, f"--workdir={run_folder(workdir, config).path}", "--pod"])
    return f'gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command={shlex.quote(train)}'


def main(argv: Sequence[str]) -> int:
    ours, rest = split_config(argv)
    arguments = parser(
        "sweep",
        "Train and measure many models and seeds, a folder each, and make one table. Stopped at any point, the same"
        " command goes on; started twice with different ids, both share the table.",
        "phase-jax sweep --ids full_attn_1kv kvc_w8s8_1kv_baseline --seeds 42 1 2 --workdir runs/sweep",
    )
    arguments.add_argument("--ids", nargs="+", required=True, metavar="ID", help="ids of phase-jax configs")
    arguments.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="(default: each id's own)")
    arguments.add_argument("--config", metavar="FILE.py", help=f"(default {CONFIG})")
    arguments.add_argument("--logical", type=int, default=1000, metavar="N", help="logical samples (default 1000)")
    arguments.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=["prefix", "insequence"])
    arguments.add_argument("--vmap-seeds", action="store_true", help="train the seeds of an id together, in one call")
    arguments.add_argument("--print-launch", action="store_true", help="only print the commands for a TPU pod")
    arguments.add_argument("--workdir", type=Path, default=Path("runs/sweep"))
    options = arguments.parse_args(rest)
    if options.logical < 1:
        raise UserError(f"--logical {options.logical}: at least one logical sample is needed")
    groups = runs_by_id(ours, options.ids, options.seeds)
    if options.print_launch:
        print(*(launch_line(*run, options.workdir) for group in groups for run in group), sep="\n")
        return 0

    from experiments.runtime import prepare
    from phase_jax.training.loop import train, train_together

    prepare()
    console = Console(stderr=True)
    for group in groups:
        configs = [config for config, _ in group]
        folders = [run_folder(options.workdir, config) for config in configs]
        if options.vmap_seeds and len(configs) > 1 and not all(folder.training.exists() for folder in folders):
            train_together(configs, folders)
            ratio = together_over_apart(configs)
            console.print(
                f"{configs[0].id}: a step of {len(configs)} seeds together took {ratio:.2f} × as long as apart"
            )
        for config, folder in zip(configs, folders, strict=True):
            train(config, folder)
            for protocol in options.protocols:
                report, _ = evaluate_run(folder, protocol, options.logical)
                console.print(f"seed {config.seed} {summary_line(report)}")
    rows = summary(reports_of(options.workdir))
    write_json(options.workdir / "summary.json", {"rows": rows})
    Console(width=None if console.is_terminal else 140).print(table(rows))
    print(options.workdir / "summary.json")
    return 0
