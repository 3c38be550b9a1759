"""phase-jax bench knockout: all knockouts of a model from one prefill, and the same by a forward pass each."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.options import parser
from experiments.reproduce import lab_run
from phase_jax.errors import UserError
from phase_jax.run import write_json

MODELS = ("kvc_w8s8_1kv_baseline", "kvc_w8s8_4kv")


def measure(variant: str, logical: int, repeats: int) -> dict:
    """Seconds of each way (medians; the ways take turns), and the largest difference of their NLLs.

    The model has the parameters it begins with: what is computed does not depend on them.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from experiments.evaluate import run_prompts
    from phase_jax.evaluation import sweep
    from phase_jax.interventions import knockout as tool
    from phase_jax.model import Heads, Intervention, Transformer
    from phase_jax.model.cache import empty_cache, extend_unchecked

    config = lab_run(variant)
    model, words = Transformer(config.model), config.data.vocabulary
    prompts = run_prompts(config, "prefix", logical, 0)
    n, residues, length = prompts.tokens.shape
    params = model.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))["params"]
    plan = tool.knockouts(config.model, length)[: config.model.layers * config.model.kv_heads]
    shape = (config.model.layers, 1, 1, config.model.query_heads, config.model.head_dim)
    means = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    where = np.stack([knockout.where for knockout in plan])
    first = np.array([knockout.first for knockout in plan], np.int32)
    shared = params, (tool.Group(first, where, means),)
    last = np.arange(length)[:, None] == length - 1

    @jax.jit
    def prefilled(tokens):
        tokens = tokens.reshape(-1, length)[:, :-1]
        return extend_unchecked(model, params, empty_cache(config.model, len(tokens), length), tokens)

    @jax.jit
    def whole_pass(where, tokens, answer):
        change = Intervention(Heads(where[:, None, None] & last, means))
        logits = model.apply({"params": params}, tokens.reshape(-1, length), last_only=True, change=change)
        logits = logits.reshape(*tokens.shape[:2], -1)
        return sweep.scores_of(logits, answer[:, None], words)["nll"]

    def by_batches(call: Callable) -> Callable[[], list]:
        starts = range(0, n, tool.BATCH)
        rows = [slice(start, start + tool.BATCH) for start in starts]
        return lambda: jax.block_until_ready([call(prompts.tokens[own], prompts.answer[own]) for own in rows])

    ways = {
        "clean evaluation": by_batches(lambda tokens, answer: sweep.score(model, words, params, tokens, answer)["nll"]),
        "prefill": by_batches(lambda tokens, answer: prefilled(tokens)),
        "knockouts": by_batches(lambda t, a: tool.score(model, words, (1,), shared, t, a)["nll"][:, 1:]),
        "a pass each": by_batches(lambda t, a: jnp.stack([whole_pass(one, t, a) for one in where], axis=1)),
    }
    results = {name: run() for name, run in ways.items()}  # and compiled
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    ours, theirs = (np.concatenate(results[name]) for name in ("knockouts", "a pass each"))
    return {
        "model": variant,
        "knockouts": len(plan),
        "prompts": n * residues,
        "seconds": {name: float(np.median(times)) for name, times in seconds.items()},
        "largest_difference": float(np.abs(ours - theirs).max()),
    }


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "bench knockout",
        "Time all knockouts of a lab model from one prefill, and by a whole forward pass each; both give the same.",
        "phase-jax bench knockout --logical 16",
    )
    arguments.add_argument("--models", nargs="+", default=MODELS, metavar="ID", help="ids of phase-jax configs")
    arguments.add_argument("--logical", type=int, default=16, help="logical samples, a multiple of 8 (default 16)")
    arguments.add_argument("--repeats", type=int, default=5, help="timed runs of each way (default 5)")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = arguments.parse_args(argv)
    if options.repeats < 1:
        raise UserError(f"--repeats {options.repeats}: at least one is needed")
    if options.logical < 1 or options.logical % 8:
        raise UserError(f"--logical {options.logical}: choose a multiple of 8, so that all batches are alike")

    from experiments.runtime import prepare

    prepare(compilation_cache=False)
    rows = [measure(variant, options.logical, options.repeats) for variant in options.models]
    for row in rows:
        seconds = row["seconds"]
        unit = seconds["clean evaluation"] + seconds["prefill"]
        print(f"{row['model']}, {row['prompts']} prompts, {row['knockouts']} knockouts:")
        for name, value in seconds.items():
            print(f"  {name:<18}{value:>8.2f} s{value / unit:>8.2f} of (clean evaluation + prefill)")
        print(f"  largest difference of NLL: {row['largest_difference']:.1e} nats")
    if options.json:
        write_json(options.json, {"rows": rows})
    return 0
