"""phase-jax prompts: prompts with known positions for any tokenizer, written to a file."""

import resource
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.options import parser
from phase_jax.data.lexicon import CHOICES, make_lexicon
from phase_jax.data.padding import PROTOCOLS
from phase_jax.data.promptfile import read_prompts, write_prompts
from phase_jax.data.tasks import Task
from phase_jax.data.tokenizers import SHIPPED, Tokenizer, load_tokenizer, special_token
from phase_jax.errors import UserError
from phase_jax.progress import progress_bar

# What a task is where the command does not say otherwise (SPEC §4, §5).
TASKS = {
    "records": {
        "tokens": 256,
        "records": 64,
        "residues": 24,
        "samples": 1000,
        "demonstrations": 8,
        "closing_filler": 0,
        "keys": "animals",
        "values": "names",
    },
    "needle": {
        "tokens": 128_000,
        "records": 16_000,
        "residues": 8,
        "samples": 256,
        "demonstrations": 0,
        "closing_filler": 128,
        "keys": "words",
        "values": "words",
    },
}
AROUND = {"records": ("", ""), "needle": (":", "\n")}  # what follows a record's key and its value


def summary(manifest: dict) -> str:
    """One line on what a file of prompts holds."""
    checks = manifest["checks"]
    matched = "match" if checks["matched"] else "DO NOT MATCH to 1 % (take more samples)"
    return (
        f"{manifest['samples']} samples on {manifest['residues']} residues, {manifest['tokens']} tokens of"
        f" {manifest['tokenizer']['name']}, {manifest['records']} records, {manifest['protocol']} padding; target"
        f" positions {matched} over residues: means within"
        f" {checks['mean_deviation']:.3g} tokens, variances within {100 * checks['variance_deviation']:.2g} %"
    )


def excerpt(tokenizer: Tokenizer, tokens: np.ndarray, position: int, length: int) -> str:
    """The text of the target's record and of the prompt's end."""
    record, end = tokens[position : position + length], tokens[-length:]
    return f"target {tokenizer.decode(record)!r} at token {position}; the end {tokenizer.decode(end)!r}"


def tokenizer_of(path: Path, manifest: dict, name: str | None = None) -> Tokenizer:
    """The tokenizer that a file's prompts were made with. Raises UserError where the one of that `name` is another."""
    tokenizer = load_tokenizer(name or manifest["tokenizer"]["name"])
    if tokenizer.hash != manifest["tokenizer"]["sha256"]:
        raise UserError(f"{path} was made with another vocabulary than tokenizer '{tokenizer.name}': name its own")
    return tokenizer


def check(path: Path, name: str | None) -> int:
    """Reads a file of prompts, which checks it, and says what is in it, as the tokenizer `name` shows it."""
    prompts, manifest = read_prompts(path)
    print(f"{path} is whole: {summary(manifest)}")
    tokenizer = tokenizer_of(path, manifest, name)
    position = int(prompts.target_position[0, 0])
    print(excerpt(tokenizer, prompts.tokens[0, 0], position, manifest["record_length"]))
    return 0


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "prompts",
        "Write prompts with known positions for any tokenizer: every logical sample on each residue of the target.",
        "phase-jax prompts --task needle --tokenizer qwen --tokens 128000 --out needle.npz",
    )
    what = arguments.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FILE", help="the .npz to write")
    what.add_argument("--check", type=Path, metavar="FILE", help="read a file of prompts instead, and check it")
    arguments.add_argument("--task", choices=TASKS, default="needle", help="key:value lines, or bare pairs (records)")
    arguments.add_argument("--tokenizer", help=f"{', '.join(SHIPPED)}, or a tokenizer.json (default qwen)")
    arguments.add_argument("--protocol", choices=PROTOCOLS, default="prefix", help="how the target is moved")
    for name in ("tokens", "records", "residues", "samples", "demonstrations", "closing_filler"):
        usual = ", ".join(f"{task} {values[name]}" for task, values in TASKS.items())
        arguments.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"default: {usual}")
    for name in ("keys", "values"):
        arguments.add_argument(f"--{name}", metavar="LIST", help=f"{', '.join(CHOICES)}, or a file of words")
    arguments.add_argument(
        "--bos", choices=("own", "end-of-text", "none"), help="token 0; default: the tokenizer's own, or none"
    )
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args(argv)
    if options.check:
        return check(options.check, options.tokenizer)

    began = time.perf_counter()
    chosen = {
        name: usual if (given := getattr(options, name)) is None else given
        for name, usual in TASKS[options.task].items()
    }
    keys, values = chosen.pop("keys"), chosen.pop("values")
    tokenizer = load_tokenizer(options.tokenizer or "qwen")
    bos = tokenizer.bos if options.bos is None else special_token(tokenizer, options.bos)
    after_key, after_value = AROUND[options.task]
    lexicon = make_lexicon(
        tokenizer, keys, values, bos=bos, after_key=after_key, after_value=after_value, seed=options.seed
    )
    task = Task(lexicon, options.protocol, seed=options.seed, **chosen)
    with progress_bar() as bar:
        shown = bar.add_task(options.task, total=task.samples, note="logical samples")
        manifest = write_prompts(
            options.out,
            task,
            tokenizer,
            {"task": options.task, "keys": keys, "values": values},
            lambda made: bar.update(shown, completed=made),
        )
    seconds = time.perf_counter() - began
    tokens = task.samples * task.residues * task.tokens
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{options.out}: {summary(manifest)}")
    print(
        f"{tokens / 1e6:.1f} million tokens in {seconds:.1f} s, {tokens / seconds / 1e6:.2f} million a second,"
        f" peak memory {peak / 2**30:.2f} GiB, {options.out.stat().st_size / 2**30:.2f} GiB"
    )
    return 0
