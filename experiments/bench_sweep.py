"""phase-jax bench sweep: what training and evaluating the lab's models cost, and the data's share of it."""

import json
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.options import parser
from experiments.reproduce import MODELS, lab_run
from phase_jax.progress import console
from phase_jax.run import write_json

REPEATS = 20


def median_seconds(call: Callable[[int], object]) -> float:
    """Median wall time of `call(i)`, its result waited for, after one call that does not count."""
    import jax

    jax.block_until_ready(call(0))
    times = []
    for i in range(1, REPEATS + 1):
        began = time.perf_counter()
        jax.block_until_ready(call(i))
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def measure(variant: str) -> dict:
    """Costs of one lab model: of its last training stage and of one call of the sweep."""
    import jax

    from phase_jax.data.prompts import phase_prompts
    from phase_jax.data.recall import batch_for_step
    from phase_jax.evaluation.sweep import BATCH, score
    from phase_jax.model import Transformer
    from phase_jax.training.optimizer import make_optimizer
    from phase_jax.training.step import init_state, make_train_step

    config = lab_run(variant)
    train, data = config.train, config.data
    model, optimizer = Transformer(config.model), make_optimizer(train.optimizer, train.steps)
    key, last = jax.random.key(0), train.steps - 1
    state = jax.jit(lambda key: init_state(model, optimizer, key))(key)

    def batch(i):
        return batch_for_step(data, train.batch, last, train.steps, jax.random.fold_in(key, i))

    began = time.perf_counter()
    step = make_train_step(model, optimizer, train.first_layer_weight).lower(state, batch(0)).compile()
    compile_seconds = time.perf_counter() - began

    def one_step(i):
        nonlocal state
        state, metrics = step(state, fixed)
        return metrics

    data_seconds, fixed = median_seconds(batch), batch(0)
    step_seconds = median_seconds(one_step)
    prompts = phase_prompts(data.vocabulary, "prefix", BATCH, **data.prompt_sizes, seed=0)
    sweep_seconds = median_seconds(
        lambda i: score(model, data.vocabulary, state.params, prompts.tokens, prompts.answer)
    )
    n_prompts = prompts.tokens[..., 0].size
    return {
        "model": variant,
        "train_tokens": train.batch * data.length,
        "train_step_seconds": step_seconds,
        "train_tokens_per_second": train.batch * data.length / step_seconds,
        "data_seconds": data_seconds,
        "data_share": data_seconds / (data_seconds + step_seconds),
        "compile_seconds": compile_seconds,
        "prompts": n_prompts,
        "prompt_length": data.length,
        "prompts_per_second": n_prompts / sweep_seconds,
        "seconds_for_24000_prompts": 24_000 * sweep_seconds / n_prompts,
    }


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "bench sweep",
        "Measure training and evaluation of the lab's models: medians over 20 calls, the compilation apart.",
        "phase-jax bench sweep --json bench.json",
    )
    arguments.add_argument("--models", nargs="+", default=MODELS, metavar="ID")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = arguments.parse_args(argv)

    import jax

    from experiments.runtime import prepare

    prepare(compilation_cache=False)
    rows = []
    for variant in options.models:
        console.print(f"measuring {variant} …")
        rows.append(measure(variant))
    full = rows[0]["train_step_seconds"]
    table = Table("model", box=box.SIMPLE_HEAD, title=f"{jax.devices()[0].device_kind}, {jax.device_count()} device(s)")
    for heading in ("train step", f"ratio to {rows[0]['model']}", "tokens/s", "data's share", "compile", "prompts/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            f"{1e3 * row['train_step_seconds']:.0f} ms",
            f"{row['train_step_seconds'] / full:.2f}",
            f"{row['train_tokens_per_second']:,.0f}",
            f"{row['data_share']:.1%}",
            f"{row['compile_seconds']:.1f} s",
            f"{row['prompts_per_second']:,.0f}",
        )
    Console(width=120).print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak memory {peak / 2**30:.2f} GiB; batch and length: {rows[0]['train_tokens']} training tokens a step,")
    print(f"prompts of {rows[0]['prompt_length']} tokens, {rows[0]['prompts']} a call")
    if options.json:
        write_json(options.json, json.loads(json.dumps({"rows": rows, "peak_bytes": peak})))
    return 0
