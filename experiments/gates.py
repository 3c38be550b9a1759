"""phase-jax gates: where the gates of a trained model look, and how they came to."""

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
from phase_jax.run import RunFolder, write_json
from phase_jax.statistics import wilson

LOGICAL = 48  # samples, each on 24 residues: thousands of windows


def gates_run(folder: RunFolder, protocol: str, logical: int, seed: int = SEED) -> dict:
    """The report of a run's gates at every kept checkpoint, stored as interventions/gates-<protocol>.

    Where the run's knockouts are stored, heads are aligned with them. Raises UserError where the run is not trained,
    has no learned gates, or a size is impossible.
    """
    config = trained(folder)

    from phase_jax.interventions.gates import aligned, check_gates, gates_report, measure_gates
    from phase_jax.model import Transformer
    from phase_jax.progress import progress_bar
    from phase_jax.training.loop import load_params, saved_steps

    check_gates(config.model, config.id)
    steps = saved_steps(folder)
    made_of = {"protocol": protocol, "n_logical": logical, "prompt_seed": seed, "steps": steps}
    target = folder.intervention(f"gates-{protocol}")

    def measured(_: Path) -> tuple[dict, dict]:
        model, prompts = Transformer(config.model), run_prompts(config, protocol, logical, seed)
        with progress_bar() as bar:
            task = bar.add_task(f"{config.id} {protocol} gates", total=logical * len(steps), note="logical samples")
            found = [
                measure_gates(model, load_params(config, folder, step), prompts, lambda n: bar.advance(task, n))
                for step in steps
            ]
        arrays = {
            f"{branch}_mass": np.stack([each[branch]["mass"] for each in found])
            for branch in found[0].keys() - {"windows"}
        }
        return {"model": config.id, **made_of, **gates_report(config.model, found)}, arrays

    report, _ = once(target, made_of, measured)
    knockout = stored(folder.intervention(f"knockout-{protocol}"), {})
    if knockout:
        report = aligned(report, knockout)
        write_json(target.with_suffix(".json"), report)
    return report


def gates_table(names: Sequence[str], reports: Sequence[dict]) -> Table:
    """Every head's gates, a line a head."""
    title = f"gates, {reports[0]['protocol']}: effective offsets (static / per window), peak offsets, key gate by phase"
    result = Table("run", "head", box=box.SIMPLE_HEAD, title=title)
    for heading in ("K offsets", "V offsets", "K peak", "V peak", "shift", "alignment (p)", "K gate / uniform"):
        result.add_column(heading, justify="right")
    for name, report in zip(names, reports, strict=True):
        for head in report["heads"]:
            branches, found = (head["key"], head["value"]), head["alignment"]
            known = found is not None and found["correlation"] is not None
            result.add_row(
                name,
                f"{head['layer']}.{head['head']}",
                *("–" if gate is None else f"{gate['static']:.2f} / {gate['per_window']:.2f}" for gate in branches),
                *("–" if gate is None else str(gate["peak"]) for gate in branches),
                "–" if head["best_shift"] is None else f"{head['best_shift']:+}",
                f"{found['correlation']:.2f} ({found['p_value']:.3f})" if known else "–",
                " ".join(f"{x:.1f}" for x in head["key"]["profile"]),
            )
    return result


def summary_lines(reports: Sequence[dict]) -> list[str]:
    """What the heads of all reports show together: counts with Wilson's 95 % intervals.

    Where values are keys there is no value gate, and those heads do not count in what is said of it.
    """
    heads = [head for report in reports for head in report["heads"]]
    known = [head for head in heads if head["alignment"]]
    kinds = {
        "concentrated": [head for head in heads if head["concentrated"]],
        "specialised": [head for head in known if head["alignment"]["specialised"]],
    }
    lines = [_count(kinds["concentrated"], heads, "heads are statically concentrated")]
    if known:
        lines.append(_count(kinds["specialised"], known, "heads are specialised: they matter more at some phases"))
    for kind, of_kind in kinds.items():
        both = [head for head in of_kind if head["value"]]
        after = [head for head in both if head["peak_difference"] == 1]
        moved = [head for head in both if head["best_shift"] == 1]
        if both:
            lines.append(_count(after, both, f"{kind} heads have their value gate's peak one offset after the key's"))
            lines.append(_count(moved, both, f"{kind} heads' value gate is the key gate moved by one offset"))
    specialised = kinds["specialised"]
    if specialised:
        both = [head for head in specialised if head["concentrated"]]
        best = [
            head for head in specialised if _best(head["key"]["profile"]) == _best(head["alignment"]["loss_by_phase"])
        ]
        lines.append(_count(both, specialised, "specialised heads are statically concentrated"))
        lines.append(_count(best, specialised, "specialised heads lose most at their key gate's best phase"))
    return lines


def _best(values: Sequence[float]) -> int:
    return int(np.argmax(values))


def _count(some: Sequence, among: Sequence, what: str) -> str:
    low, high = (100 * float(bound) for bound in wilson(len(some), len(among)))
    return f"{len(some)} of {len(among)} ({low:.0f}–{high:.0f} %) {what}"


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "gates",
        "Measure the gates of trained models over the windows that hold records: which offsets they favour, how"
        " concentrated they are always (static) and in each window, and over training. After phase-jax knockout also"
        " whether a head's losses lie where its key gate is open.",
        "phase-jax gates --workdir runs/w8s8",
    )
    arguments.add_argument("--workdir", type=Path, nargs="+", required=True, help="folders of runs")
    arguments.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=["prefix", "insequence"])
    arguments.add_argument(
        "--logical", type=int, default=LOGICAL, metavar="N", help=f"logical samples (default {LOGICAL})"
    )
    arguments.add_argument("--seed", type=int, default=SEED, help="seed of the prompts")
    options = arguments.parse_args(argv)

    from experiments.runtime import prepare

    prepare()
    console = Console(width=None if sys.stdout.isatty() else 140)
    folders = [RunFolder(path) for path in options.workdir]
    for protocol in options.protocols:
        reports = [gates_run(folder, protocol, options.logical, options.seed) for folder in folders]
        console.print(gates_table([folder.path.name for folder in folders], reports))
        print(*summary_lines(reports), sep="\n")
        print(*(folder.intervention(f"gates-{protocol}").with_suffix(".json") for folder in folders), sep="\n")
    return 0
