"""phase-jax bench training: the training step of compressed attention beside full attention's.

Lab models on batches of tokens, of as many tokens at every length; steps of the two alternate, and medians are
compared, so that a busy machine slows both. `--paper` measures the 0.6B models at their own length instead, with
model-FLOPs utilisation: it needs an accelerator.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from configs.family import model_config
from experiments.options import parser
from phase_jax.errors import UserError
from phase_jax.run import write_json

LAB, PAPER = ("full_attn_1kv", "kvc_w8s8_1kv_baseline"), ("full_attn_8kv", "kvc_w8s8_8kv")
LENGTHS, TOKENS, STEPS = (1024, 8192), 8192, 7
DENSE_UP_TO, BLOCK = 1024, 256  # above, scores of all pairs at once would fill the memory

# Dense bf16 FLOPs a second of a chip, from its maker's data sheet.
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "TPU v5 lite": 197e12, "TPU v5": 459e12, "TPU v6 lite": 918e12}


def stepper(cfg, batch: int, length: int) -> Callable[[], None]:
    """A compiled training step on random tokens that waits for its result; its compilation is done."""
    import jax

    from phase_jax.data.tokens import TokenBatch
    from phase_jax.model import Transformer
    from phase_jax.training.optimizer import OptimizerConfig, make_optimizer
    from phase_jax.training.step import init_state, make_train_step

    model, optimizer = Transformer(cfg), make_optimizer(OptimizerConfig(), 1000)
    state = jax.jit(lambda key: init_state(model, optimizer, key))(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, cfg.vocabulary, (batch, length + 1), np.int32)
    data = jax.device_put(TokenBatch(tokens[:, :-1], tokens[:, 1:], np.ones((batch, length), bool)))
    step = make_train_step(model, optimizer)

    def one_step():
        nonlocal state
        state, metrics = step(state, data)
        jax.block_until_ready(metrics)

    one_step()
    return one_step


def alternating_medians(calls: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """Median seconds of each call, all of them called in turn."""
    times = np.empty((repeats, len(calls)))
    for row in times:
        for i, call in enumerate(calls):
            began = time.perf_counter()
            call()
            row[i] = time.perf_counter() - began
    return np.median(times, axis=0).tolist()


def compare(configs: dict, batch: int, length: int, repeats: int) -> list[dict]:
    """A row a model: seconds a step, tokens a second, time over the first model's, model-FLOPs utilisation."""
    import jax

    from phase_jax.model.flops import training_flops

    device = jax.devices()[0].device_kind
    peak = next((flops for name, flops in PEAK.items() if device.removeprefix("NVIDIA ").startswith(name)), None)
    seconds = alternating_medians([stepper(cfg, batch, length) for cfg in configs.values()], repeats)
    rows = []
    for (variant, cfg), each in zip(configs.items(), seconds, strict=True):
        rate = batch * length / each
        mfu = None if peak is None else rate * training_flops(cfg, length) / peak
        row = {"model": variant, "T": length, "batch": batch, "step_seconds": each, "tokens_per_second": rate}
        rows.append({**row, "ratio": each / seconds[0], "mfu": mfu, "device": device})
    return rows


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "bench training",
        "Training steps of compressed and full attention, alternating: medians and their ratio.",
        "phase-jax bench training --json training.json",
    )
    arguments.add_argument(
        "--lengths", nargs="+", type=int, metavar="T", help=f"tokens (default {LENGTHS}; paper 4096)"
    )
    arguments.add_argument("--steps", type=int, default=STEPS, help="timed steps of each model (default %(default)s)")
    arguments.add_argument("--paper", action="store_true", help="the 0.6B models: tokens/s and MFU on an accelerator")
    arguments.add_argument("--batch", type=int, help="sequences a step (default: 8,192 tokens' worth; paper 8)")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = arguments.parse_args(argv)
    lengths = options.lengths or ((4096,) if options.paper else LENGTHS)
    if min(*lengths, options.steps, options.batch or 1) < 1:
        raise UserError("--lengths, --steps and --batch take numbers from 1 on")

    import jax

    from experiments.runtime import prepare

    prepare(compilation_cache=False)
    if options.paper and jax.default_backend() == "cpu":
        raise UserError("--paper needs an accelerator: a step of 0.6B parameters takes a CPU many minutes")
    rows = []
    print(f"{'model':<24}{'T':>7}{'step s':>9}{'ratio':>7}{'tokens/s':>11}{'MFU':>7}")
    for length in lengths:
        if options.paper:
            configs = {v: dataclasses.replace(model_config(v, "paper"), attention_block=512) for v in PAPER}
            batch = options.batch or 8
        else:
            block = None if length <= DENSE_UP_TO else BLOCK
            configs = {v: dataclasses.replace(model_config(v, "lab"), attention_block=block) for v in LAB}
            batch = options.batch or max(1, TOKENS // length)
        for row in compare(configs, batch, length, options.steps):
            mfu = "–" if row["mfu"] is None else f"{row['mfu']:.1%}"
            numbers = f"{row['step_seconds']:>9.3f}{row['ratio']:>7.2f}{row['tokens_per_second']:>11,.0f}{mfu:>7}"
            print(f"{row['model']:<24}{length:>7}{numbers}", flush=True)
            rows.append(row)
    if options.json:
        write_json(options.json, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
