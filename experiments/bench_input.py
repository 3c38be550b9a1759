"""phase-jax bench input: what reading a corpus costs beside what training on it consumes, and that memory is flat."""

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.options import parser
from phase_jax.progress import console
from phase_jax.run import write_json

ROUNDS = 5


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "bench input",
        "Measure how fast batches come from a corpus and how fast the lab's models train on them: medians over 5"
        " alternating rounds, and the process's memory while many more batches are read.",
        "phase-jax bench input --corpus corpora/texts --batches 20000",
    )
    arguments.add_argument("--corpus", type=Path, help="a corpus of bytes (default: Python's language reference)")
    arguments.add_argument("--batches", type=int, default=5000, help="batches read for the memory (default 5000)")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = arguments.parse_args(argv)

    from experiments.corpus import make
    from experiments.runtime import prepare
    from phase_jax.data.documents import python_documentation

    prepare(compilation_cache=False)
    with tempfile.TemporaryDirectory() as scratch:
        corpus = options.corpus
        if corpus is None:
            corpus = Path(scratch) / "corpus"
            make(python_documentation(), corpus, "pydoc_data.topics", record_tokens=1024, held_out=0.1)
        figures = measure(corpus, options.batches)
    result = Table("model", "tokens/s of training", "of the input", "ratio", box=box.SIMPLE_HEAD)
    for row in figures["rows"]:
        rates = [f"{row[name]:,.0f}" for name in ("train_tokens_per_second", "input_tokens_per_second")]
        result.add_row(row["model"], *rates, f"{row['ratio']:.0f}")
    Console(width=120).print(result)
    memory = ", ".join(f"{bytes_ / 2**20:.1f}" for bytes_ in figures["resident_bytes"])
    print(f"resident memory after each fifth of {options.batches} more batches: {memory} MiB")
    if options.json:
        write_json(options.json, json.loads(json.dumps(figures)))
    return 0


def measure(corpus: Path, batches: int) -> dict:
    """Rates of input and training, and resident bytes while reading."""
    import jax

    from experiments.text import MODELS, text_run
    from phase_jax.model import Transformer
    from phase_jax.training.feed import open_feed
    from phase_jax.training.optimizer import make_optimizer
    from phase_jax.training.step import init_state, make_train_step

    def read(feed, count: int) -> float:
        """Tokens a second of the next batches, as one thread takes them."""
        began = time.perf_counter()
        tokens = sum(next(feed).tokens.size for _ in range(count))
        return tokens / (time.perf_counter() - began)

    rows = []
    for variant in MODELS:
        console.print(f"measuring {variant} …")
        config = text_run(variant, corpus)
        model, optimizer = Transformer(config.model), make_optimizer(config.train.optimizer, config.train.steps)
        state = jax.jit(lambda key, m=model, o=optimizer: init_state(m, o, key))(jax.random.key(0))
        step, feed = make_train_step(model, optimizer), open_feed(config)
        batch = next(feed)
        state, _ = jax.block_until_ready(step(state, batch))
        training, reading = [], []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for _ in range(4):
                state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            training.append(4 * batch.tokens.size / (time.perf_counter() - began))
            # The first batches were read ahead while the step ran.
            read(feed, 20)
            reading.append(read(feed, 200))
        trained, given = (sorted(rates)[ROUNDS // 2] for rates in (training, reading))
        rows.append(
            {
                "model": variant,
                "train_tokens_per_second": trained,
                "input_tokens_per_second": given,
                "ratio": given / trained,
            }
        )
    resident = []
    for _ in range(5):
        read(feed, batches // 5)
        resident.append(_resident_bytes())
    return {"rows": rows, "resident_bytes": resident, "batches": batches}


def _resident_bytes() -> int:
    """Memory that this process holds now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
