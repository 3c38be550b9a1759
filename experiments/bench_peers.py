"""phase-jax bench peers: the same weights here and in transformers on torch, on the same work.

Each side runs in a process of its own with the same number of threads; they take turns, so that whatever else the
machine does meets both. Weights travel as a Qwen3 folder. The work is a sweep (last-position logits of 24 residues of
each logical sample) and training (next-token loss, gradients, clipping, AdamW).
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from experiments.options import parser
from phase_jax.errors import UserError
from phase_jax.model.config import ModelConfig
from phase_jax.run import write_json

REPEATS = 5
TOLERANCE = {"logits": 1e-3, "losses": 1e-4}
LEARNING_RATE, CLIP, DECAY, BETAS = 1e-3, 1.0, 0.01, (0.9, 0.98)


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and the batch [B, T] that it works on; one timing is so many calls of the sweep, or training steps."""

    model: ModelConfig
    batch: int
    length: int
    sweeps: int
    steps: int


def _qwen3(layers, width, heads, kv_heads, head_dim, mlp_width, vocabulary) -> ModelConfig:
    return ModelConfig(
        layers=layers,
        width=width,
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        vocabulary=vocabulary,
    )


SIZES = {
    "lab": Size(_qwen3(3, 64, 2, 2, 32, 128, 136), batch=192, length=100, sweeps=4, steps=3),
    "mid": Size(_qwen3(8, 256, 4, 1, 64, 768, 8192), batch=24, length=512, sweeps=1, steps=1),
}


def forward_flops(size: Size) -> float:
    """Multiplications and additions in matrix products of one sweep call: [B, T] to the last position's logits.

    What the result needs counts: of the scores the causal half, and of the last layer keys and values of all positions
    and the rest at the last alone.
    """
    cfg, length = size.model, size.length
    heads = cfg.query_heads * cfg.head_dim
    keys_and_values = 4 * cfg.width * cfg.kv_heads * cfg.head_dim
    rest = 2 * cfg.width * (2 * heads + 3 * cfg.mlp_width)
    below = length * (keys_and_values + rest + 2 * heads * (length + 1))
    last = length * (keys_and_values + 4 * heads) + rest
    return size.batch * ((cfg.layers - 1) * below + last + 2 * cfg.width * cfg.vocabulary)


def _tokens(size: Size) -> np.ndarray:
    return np.random.default_rng(0).integers(0, size.model.vocabulary, (size.batch, size.length), dtype=np.int32)


# What each side can do: a function for each kind of work that returns something to compare.


def ours(folder: Path, size: Size, threads: int) -> dict[str, Callable]:
    """This project's side."""
    import jax
    import jax.numpy as jnp
    import optax

    from experiments.runtime import prepare
    from phase_jax.data.tokens import TokenBatch
    from phase_jax.model import Transformer, qwen3
    from phase_jax.training.optimizer import decayed
    from phase_jax.training.step import TrainState, make_train_step

    prepare()
    model, params = Transformer(size.model), jax.device_put(qwen3.read(folder)[1])
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.adamw(LEARNING_RATE, *BETAS, weight_decay=DECAY, mask=decayed),
    )
    fresh = jax.jit(lambda params: TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params)))
    tokens = jnp.asarray(_tokens(size))
    counted = jnp.broadcast_to(jnp.arange(size.length) < size.length - 1, tokens.shape)
    batch = TokenBatch(tokens, jnp.roll(tokens, -1, axis=1), counted)
    last = jax.jit(lambda params, tokens: model.apply({"params": params}, tokens, last_only=True))
    step = make_train_step(model, optimizer)

    def train():
        nonlocal state
        losses = []
        for _ in range(size.steps):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        return [float(loss) for loss in losses]

    def sweep():
        for _ in range(size.sweeps):
            logits = last(params, tokens).block_until_ready()
        return np.asarray(logits).tolist()

    def multiply():
        return float(square(matrix)[0, 0])

    square, matrix = jax.jit(lambda x: x @ x), jnp.ones((MATRIX, MATRIX))
    state = fresh(jax.tree.map(jnp.copy, params))
    return {"sweep": sweep, "train": train, "multiply": multiply}


def peer(folder: Path, size: Size, threads: int) -> dict[str, Callable]:
    """transformers' Qwen3 on torch."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", use_cache=False
    )
    tokens = torch.tensor(_tokens(size), dtype=torch.long)
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    norms = [weight for weight in model.parameters() if weight.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": norms, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=BETAS,
    )

    def train():
        losses = []
        for _ in range(size.steps):
            optimizer.zero_grad()
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    def sweep():
        with torch.inference_mode():
            for _ in range(size.sweeps):
                logits = model(tokens, logits_to_keep=1).logits[:, -1]
        return logits.tolist()

    def multiply():
        with torch.inference_mode():
            return float((matrix @ matrix)[0, 0])

    matrix = torch.ones(MATRIX, MATRIX)
    return {"sweep": sweep, "train": train, "multiply": multiply}


SIDES = {"ours": ours, "peer": peer}
MATRIX = 2048


def serve(side: str, name: str, folder: Path, threads: int) -> int:
    """One side's process: reads a kind of work from each line, answers with its seconds and result as JSON."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(threads))
    work = SIDES[side](folder, SIZES[name], threads)
    for line in sys.stdin:
        began = time.perf_counter()
        result = work[line.strip()]()
        print(json.dumps({"seconds": time.perf_counter() - began, "result": result}), flush=True)
    return 0


class Side:
    """A process of one side, asked for one piece of work at a time."""

    def __init__(self, side: str, name: str, folder: Path, threads: int):
        self.name = side
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen={str(threads > 1).lower()}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "experiments.bench_peers", "--serve", side, name, str(folder), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": flags, "OMP_NUM_THREADS": str(threads), "JAX_PLATFORMS": "cpu"},
        )

    def ask(self, work: str) -> tuple[float, list | float]:
        self.process.stdin.write(work + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise UserError(f"the process of {self.name} ended while asked to {work}; what it said is above")
        answer = json.loads(answer)
        return answer["seconds"], answer["result"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def measure(name: str, threads: int) -> dict:
    """Both sides of one size, taking turns; medians of REPEATS. Raises UserError where their answers differ."""
    import jax

    from phase_jax.model import Transformer, qwen3

    size = SIZES[name]
    params = Transformer(size.model).init(jax.random.key(0), np.zeros((1, 2), np.int32))["params"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "qwen3"
        qwen3.write(folder, size.model, jax.device_get(params), "float32")
        sides = [Side(side, name, folder, threads) for side in SIDES]
        try:
            answers = {work: [side.ask(work)[1] for side in sides] for work in ("sweep", "train")}  # compiles, too
            difference = {
                "logits": float(np.abs(np.subtract(*answers["sweep"])).max()),
                "losses": float(np.abs(np.subtract(*answers["train"])).max()),
            }
            if wrong := [what for what, limit in TOLERANCE.items() if not difference[what] <= limit]:
                raise UserError(f"{name}: the {wrong[0]} of both sides differ by {difference[wrong[0]]:.2g}")
            seconds = {work: {side.name: [] for side in sides} for work in ("sweep", "train", "multiply")}
            for _ in range(REPEATS):
                for work, by_side in seconds.items():
                    for side in sides:
                        by_side[side.name].append(side.ask(work)[0])
        finally:
            for side in sides:
                side.close()
    median = {work: {side: statistics.median(own) for side, own in by.items()} for work, by in seconds.items()}
    rate = {side: 2 * MATRIX**3 / own for side, own in median["multiply"].items()}
    prompts, trained = size.batch * size.sweeps, size.steps * size.batch * size.length
    needed = {"sweep": forward_flops(size) * size.sweeps}
    return {
        "difference": difference,
        "prompts_per_second": {side: prompts / own for side, own in median["sweep"].items()},
        "training_tokens_per_second": {side: trained / own for side, own in median["train"].items()},
        "sweep_ratio": median["sweep"]["peer"] / median["sweep"]["ours"],
        "train_ratio": median["train"]["peer"] / median["train"]["ours"],
        "matmul_rate": rate,
        "matmul_share": needed["sweep"] / median["sweep"]["ours"] / max(rate.values()),
        "seconds": seconds,
    }


def machine() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "bench peers",
        "The same Qwen3-shaped weights here and in transformers on torch, f32, taking turns (extra 'parity').",
        "phase-jax bench peers --json peers.json",
    )
    arguments.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="(default: all)")
    arguments.add_argument("--threads", type=int, default=2, metavar="N", help="of each side (default 2)")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    arguments.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = arguments.parse_args(argv)
    if options.serve:
        side, name, folder, threads = options.serve
        return serve(side, name, Path(folder), int(threads))
    if not 1 <= options.threads <= os.cpu_count():
        raise UserError(f"--threads {options.threads}: this machine has {os.cpu_count()} cores to give")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UserError(f"{error.name} is missing: pip install 'phase-jax[parity]'") from None
    import jax

    versions = {"jax": jax.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    print(f"{machine()}, {options.threads} threads a side;", ", ".join(f"{k} {v}" for k, v in versions.items()))
    rows = {}
    for name in options.sizes:
        rows[name] = row = measure(name, options.threads)
        for what, unit in (("prompts_per_second", "prompts/s"), ("training_tokens_per_second", "training tokens/s")):
            ratio = row["sweep_ratio" if what.startswith("prompts") else "train_ratio"]
            print(f"{name}: {row[what]['ours']:,.0f} {unit} here, {row[what]['peer']:,.0f} there: {ratio:.2f} ×")
        print(
            f"{name}: the sweep uses {row['matmul_share']:.0%} of the machine's f32 matrix-product rate"
            f" ({max(row['matmul_rate'].values()) / 1e9:.0f} GFLOP/s); logits differ by"
            f" {row['difference']['logits']:.1g}, losses by {row['difference']['losses']:.1g}"
        )
    if options.json:
        columns = ("sweep_ratio", "train_ratio", "matmul_share")
        result = {column: {name: row[column] for name, row in rows.items()} for column in columns}
        write_json(options.json, {**result, "machine": machine(), "versions": versions, "sizes": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
