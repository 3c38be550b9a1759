"""phase-jax evaluate: sweep all phases of a trained model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.options import parser
from phase_jax.data.prompts import PROTOCOLS, phase_prompts
from phase_jax.errors import UserError
from phase_jax.run import RunFolder, read_json, write_json

SEED = 0  # of the prompts: every model meets the same logical samples, so that models can be compared in pairs


def evaluate_run(folder: RunFolder, protocol: str, logical: int, seed: int = SEED) -> tuple[dict, bool]:
    """(report, whether it was there already) of a trained run; stores both parts (see RunFolder).

    Raises UserError where the folder holds no trained run, or a size is impossible.
    """
    config = folder.read_config()
    if not folder.training.exists():
        raise UserError(f"{folder.path} is not trained to its end yet: continue it with phase-jax train")
    target = folder.evaluation(protocol)
    report_file, scores_file = target.with_suffix(".json"), target.with_suffix(".npz")
    made_of = {"protocol": protocol, "n_logical": logical, "prompt_seed": seed}
    if report_file.exists() and scores_file.exists():
        report = read_json(report_file)
        if all(report[name] == value for name, value in made_of.items()):
            return report, True
    data = config.data
    prompts = phase_prompts(
        data.vocabulary,
        protocol,
        logical,
        length=data.length,
        records=data.records,
        demonstrations=data.demonstrations,
        seed=seed,
    )

    from phase_jax.evaluation.sweep import sweep
    from phase_jax.model import Transformer
    from phase_jax.statistics import phase_report
    from phase_jax.training.loop import load_params

    scores = sweep(
        Transformer(config.model),
        load_params(config, folder),
        prompts,
        data.vocabulary,
        f"{config.id} {protocol}",
    )
    report = phase_report(
        scores["correct"],
        config.model.stride,
        nll=scores["nll"],
        gold_probability=scores["gold_probability"],
        target_position=scores["target_position"],
        model=config.id,
        width=config.model.window,
        kv_heads=config.model.kv_heads,
        protocol=protocol,
        validation_loss=read_json(folder.training)["validation_loss"],
    ).to_dict()
    report |= {
        "accuracy_of_names": scores["correct_of_names"].mean(axis=0).tolist(),
        "prompt_seed": seed,
        "prompt_length": data.length,
        "checks": prompts.checks,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial.npz")
    np.savez_compressed(partial, **scores)
    partial.replace(scores_file)
    write_json(report_file, report)
    return report, False


def summary_line(report: dict) -> str:
    """One line on a report."""
    period = report["period"] or "none"
    return (
        f"{report['model']} {report['protocol']}: mean {report['mean']:.3f}, worst {report['worst']:.3f} (residue"
        f" {report['worst_residue']}), gap {report['gap']:.3f}, period {period}, {report['verdict']}"
    )


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "evaluate",
        "Sweep all phases of a trained model: every logical sample on each of 24 residues.",
        "phase-jax evaluate --workdir=runs/w4s4 --protocol=insequence --logical=1000",
    )
    arguments.add_argument("--workdir", type=Path, required=True, help="the run's folder")
    arguments.add_argument("--protocol", choices=PROTOCOLS, default="prefix", help="how the target is moved")
    arguments.add_argument("--logical", type=int, default=1000, metavar="N", help="logical samples (default 1000)")
    arguments.add_argument("--seed", type=int, default=SEED, help="seed of the prompts")
    arguments.add_argument("--profile", type=Path, metavar="DIR", help="write a profile of the run for XProf")
    options = arguments.parse_args(argv)

    from experiments.runtime import prepare, profiled

    prepare()
    with profiled(options.profile):
        report, reused = evaluate_run(RunFolder(options.workdir), options.protocol, options.logical, options.seed)
    print(summary_line(report) + (" (measured before)" if reused else ""))
    return 0
