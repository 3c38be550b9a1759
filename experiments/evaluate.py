"""phase-jax evaluate: sweep all phases of a trained model."""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.options import parser
from experiments.prompts import tokenizer_of
from phase_jax.data.promptfile import read_prompts
from phase_jax.data.prompts import PROTOCOLS, PhasePrompts, phase_prompts
from phase_jax.data.recall import RecallConfig
from phase_jax.data.tokenizers import load_tokenizer
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.errors import UserError
from phase_jax.model import ModelConfig, qwen3
from phase_jax.run import RunConfig, RunFolder, read_json, write_json

SEED = 0  # of the prompts: every model meets the same logical samples, so that models can be compared in pairs


class Subject(NamedTuple):
    """A model that is measured, and what is known of its training."""

    id: str
    model: ModelConfig
    params: Callable[[], dict]
    tokenizer: str | None = None
    validation_loss: float | None = None


def subject_of(folder: RunFolder) -> Subject:
    """The model of a trained run, or of a Qwen3 folder. Raises UserError where the folder is neither."""
    if qwen3.is_checkpoint(folder.path):
        return Subject(folder.path.resolve().name, qwen3.read_config(folder.path), lambda: qwen3.read(folder.path)[1])
    config = trained(folder)

    def params():
        from phase_jax.training.loop import load_params

        return load_params(config, folder)

    loss = read_json(folder.training)["validation_loss"]
    return Subject(config.id, config.model, params, getattr(config.data, "tokenizer", None), loss)


def evaluate_run(folder: RunFolder, protocol: str, logical: int, seed: int = SEED) -> tuple[dict, bool]:
    """(report, whether it was there already) of a trained run; stores both parts (see RunFolder).

    Raises UserError where the folder holds no trained run, a size is impossible, or a batch failed.
    """
    config = trained(folder)
    made_of = {"protocol": protocol, "n_logical": logical, "prompt_seed": seed}

    def measured(journal: Path) -> tuple[dict, dict]:
        prompts = run_prompts(config, **made_of)
        report, scores = swept(subject_of(folder), prompts, config.data.vocabulary, protocol, journal)
        report |= {"accuracy_of_names": scores["correct_of_names"].mean(axis=0).tolist(), "prompt_seed": seed}
        return report, scores

    return once(folder.evaluation(protocol), made_of, measured)


def evaluate_prompts(folder: RunFolder, file: Path, generate: int | None = None) -> tuple[dict, bool]:
    """`evaluate_run` on the prompts of a file, as phase-jax prompts writes it; stored as evaluations/prompts-<file>.

    With `generate`, right is a greedily generated answer of so many tokens that, stripped of white space, starts with
    the gold value (SPEC §5); stored as …-generated. The folder may be Qwen3's too. Raises UserError for a file that is
    none, of other token ids than the model's, of residues that its stride does not divide, or with records that the
    exact branch reaches.
    """
    if generate is not None and generate < 1:
        raise UserError(f"--generate {generate}: at least one token is needed")
    subject = subject_of(folder)
    prompts, manifest = read_prompts(file)
    residues, stride = manifest["residues"], subject.model.stride or 1
    if residues < 2 or residues % stride:
        raise UserError(
            f"{file} has {residues} residues: {folder.path} needs 2 or more, a multiple of its stride {stride}"
        )
    check_ids(folder, subject, file, prompts, manifest)
    behind = manifest["tokens"] - int(prompts.record_position.max()) - manifest["record_length"]
    reach = subject.model.exact_branch.reach
    if reach is not None and behind <= reach:
        raise UserError(
            f"{file} has a record {behind} tokens before the end, within the {reach} that the exact branch of"
            f" {folder.path} reaches: make it with --closing-filler"
            f" {manifest['closing_filler'] + reach + 1 - behind} or more"
        )
    made_of = {"prompts_sha256": manifest["sha256"]}
    suffix, text = "", None
    if generate is not None:
        made_of["generate"], suffix, text = generate, "-generated", tokenizer_of(file, manifest).decode

    def measured(journal: Path) -> tuple[dict, dict]:
        protocol = f"{manifest['task']} {manifest['protocol']}{suffix.replace('-', ' ')}"
        report, scores = swept(subject, prompts, None, protocol, journal, generate, text)
        report |= {"prompts": str(file), **made_of, "prompt_seed": manifest["seed"]}
        return report, scores

    return once(folder.evaluation("prompts-" + file.stem.replace(".", "-") + suffix), made_of, measured)


def check_ids(folder: RunFolder, subject: Subject, file: Path, prompts: PhasePrompts, manifest: dict) -> None:
    """Raises UserError where a file's prompts are not of the token ids that a model was trained on."""
    tokenizer = subject.tokenizer
    if tokenizer is not None and load_tokenizer(tokenizer).hash != manifest["tokenizer"]["sha256"]:
        raise UserError(
            f"{file} is of tokenizer '{manifest['tokenizer']['name']}', {folder.path} was trained on '{tokenizer}'"
        )
    highest = max(int(prompts.tokens.max()), int(prompts.answer.max()))
    if highest >= subject.model.vocabulary:
        raise UserError(
            f"{file} has token ids up to {highest}, the model of {folder.path} knows {subject.model.vocabulary}:"
            " it was trained on another vocabulary"
        )


def swept(
    subject: Subject,
    prompts: PhasePrompts,
    vocabulary: Vocabulary | None,
    protocol: str,
    journal: Path,
    generate: int | None = None,
    text: Callable[[Sequence[int]], str] | None = None,
) -> tuple[dict, dict]:
    """(report, scores) of a model on phase prompts; `text` reads what it is to `generate`."""
    from phase_jax.evaluation.decode import is_right
    from phase_jax.evaluation.sweep import sweep
    from phase_jax.model import Transformer
    from phase_jax.statistics import phase_report

    config, label = subject.model, f"{subject.id} {protocol}"
    scores = sweep(Transformer(config), subject.params(), prompts, vocabulary, label, journal, generate)
    if generate is not None:
        gold = map(text, prompts.answer[:, None])
        scores["correct"] = np.array(
            [[is_right(text(ids), value) for ids in row] for row, value in zip(scores["generated"], gold, strict=True)]
        )
    report = phase_report(
        scores["correct"],
        config.stride,
        nll=scores["nll"],
        gold_probability=scores["gold_probability"],
        target_position=scores["target_position"],
        model=subject.id,
        width=config.window,
        kv_heads=config.kv_heads,
        protocol=protocol,
        validation_loss=subject.validation_loss,
    ).to_dict()
    return {**report, "prompt_length": prompts.tokens.shape[-1], "checks": prompts.checks}, scores


def evaluate_distance(folder: RunFolder, logical: int, seed: int = SEED) -> tuple[dict, bool]:
    """`evaluate_run` for the target's distance from the query instead of its phase (see evaluation/distance.py)."""
    config = trained(folder)
    made_of = {"protocol": "distance", "n_logical": logical, "prompt_seed": seed}

    def measured(journal: Path) -> tuple[dict, dict]:
        from phase_jax.evaluation.distance import distance_prompts, distance_report, measure
        from phase_jax.model import Transformer
        from phase_jax.training.loop import load_params

        data = recall_task(config)
        prompts = distance_prompts(data.vocabulary, logical, length=data.length, records=data.records, seed=seed)
        model, params = Transformer(config.model), load_params(config, folder)
        scores = measure(model, params, prompts, f"{config.id} distance", journal)
        return {"model": config.id, **made_of, **distance_report(scores, config.model)}, scores

    return once(folder.distance, made_of, measured)


def run_prompts(config: RunConfig, protocol: str, n_logical: int, prompt_seed: int) -> PhasePrompts:
    """The phase prompts of a run's task. Raises UserError for an impossible size, or a run of another task."""
    data = recall_task(config)
    return phase_prompts(data.vocabulary, protocol, n_logical, **data.prompt_sizes, seed=prompt_seed)


def recall_task(config: RunConfig) -> RecallConfig:
    """What a run was trained to recall. Raises UserError where it was trained on text."""
    if not isinstance(config.data, RecallConfig):
        raise UserError(f"this run of {config.id} was trained on text ({config.data.corpus}), not to recall names")
    return config.data


def trained(folder: RunFolder) -> RunConfig:
    """The configuration of a run that is trained to its end. Raises UserError where it is not."""
    config = folder.read_config()
    if not folder.training.exists():
        raise UserError(f"{folder.path} is not trained to its end yet: continue it with phase-jax train")
    return config


def once(target: Path, made_of: dict, measured: Callable[[Path], tuple[dict, dict]]) -> tuple[dict, bool]:
    """(report, whether it was there already) of a result at `target`, which is stored if it was not.

    `measured` makes (report, scores), and may keep what it has so far in the journal whose path it is given.
    """
    name = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:8]
    journal = target.with_name(f"{target.name}-{name}.journal")
    report = stored(target, made_of)
    reused = report is not None
    if not reused:
        report, scores = measured(journal)
        store(target, report, scores)
    journal.unlink(missing_ok=True)
    return report, reused


def stored(target: Path, made_of: dict) -> dict | None:
    """The report at `target` (without an ending) that was stored before, if it was made of the same."""
    if not (target.with_suffix(".json").exists() and target.with_suffix(".npz").exists()):
        return None
    report = read_json(target.with_suffix(".json"))
    return report if all(report.get(key) == value for key, value in made_of.items()) else None


def store(target: Path, report: dict, scores: dict) -> None:
    """Writes both parts of a result, `target` with .npz and .json, the report last."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".npz.partial")
    with open(partial, "wb") as file:
        np.savez_compressed(file, **scores)
    target.with_suffix(".json").unlink(missing_ok=True)  # what is there is the report of other scores
    partial.replace(target.with_suffix(".npz"))
    write_json(target.with_suffix(".json"), report)


def distance_table(report: dict) -> Table:
    """Accuracy and the attention that the target gets, in percent, by bands of distances and by phase."""
    phases = range(report["S"] or 0)
    result = Table("distance", title=f"{report['model']}: how far behind the query the target is", box=box.SIMPLE_HEAD)
    layers = range(len(report["mass"]["exact"]))
    on_target = [f"{part} {n}" for n in layers for part in ("entries", "exact")]
    for heading in ("accuracy", *(f"phase {p}" for p in phases), *on_target):
        result.add_column(heading, justify="right")
    for band in report["bands"]:
        first, last = band["distances"]
        by_phase = band["accuracy_by_phase"] or ()
        mass = [band["mass"][f"{part}_of_target"][n] for n in layers for part in ("entries", "exact")]
        cells = ["–" if x is None else f"{100 * x:.0f}" for x in (band["accuracy"], *by_phase, *mass)]
        result.add_row(f"{first}–{last}", *cells)
    return result


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
    arguments.add_argument("--workdir", type=Path, required=True, help="the run's folder, or (with --prompts) Qwen3's")
    arguments.add_argument("--protocol", choices=PROTOCOLS, default="prefix", help="how the target is moved")
    instead = arguments.add_mutually_exclusive_group()
    instead.add_argument(
        "--distance", action="store_true", help="move the target away from the query instead, at every phase"
    )
    instead.add_argument("--prompts", type=Path, metavar="FILE", help="score what phase-jax prompts wrote instead")
    arguments.add_argument(
        "--generate", type=int, metavar="N", help="with --prompts: right is what N generated tokens begin with"
    )
    arguments.add_argument("--logical", type=int, default=1000, metavar="N", help="logical samples (default 1000)")
    arguments.add_argument("--seed", type=int, default=SEED, help="seed of the prompts")
    arguments.add_argument("--profile", type=Path, metavar="DIR", help="write a profile of the run for XProf")
    options = arguments.parse_args(argv)
    if options.generate is not None and options.prompts is None:
        raise UserError("--generate goes with --prompts: names of the recall task are one token each")

    from experiments.runtime import prepare, profiled

    prepare()
    folder = RunFolder(options.workdir)
    if options.distance:
        with profiled(options.profile):
            report, reused = evaluate_distance(folder, options.logical, options.seed)
        from phase_jax.reports.figures import distance_figure, save

        Console(width=None if sys.stdout.isatty() else 140).print(distance_table(report))
        print("entries and exact: percent of the last position's attention on the target, by layer")
        images = save(distance_figure(report), folder.distance)
        print(folder.distance.with_suffix(".json"), *images, "(measured before)" if reused else "")
        return 0
    with profiled(options.profile):
        if options.prompts:
            report, reused = evaluate_prompts(folder, options.prompts, options.generate)
        else:
            report, reused = evaluate_run(folder, options.protocol, options.logical, options.seed)
    print(summary_line(report) + (" (measured before)" if reused else ""))
    return 0
