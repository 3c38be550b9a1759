"""phase-jax bench knockout: all knockouts of a model from one prefill, and the same by a forward pass each."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from experiments.options import parser
from experiments.reproduce import lab_run
from phase_jax.errors import UserError
from phase_jax.run import write_json

MODELS = ("kvc_w8s8_1kv_baseline", "kvc_w8s8_4kv")


def measure(variant: str, logical: int, each: int, repeats: int) -> dict:
    """Seconds of each way (medians; the ways take turns), and the largest difference of their NLLs.

    Only the first `each` samples get a forward pass for each knockout, and both ways are compared on them. The model
    has the parameters it begins with: how long it takes does not depend on them.
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
    _, residues, length = prompts.tokens.shape
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

    def run(way: Callable, samples: int) -> Iterator[jax.Array]:
        for start in range(0, samples, tool.BATCH):
            own = slice(start, start + tool.BATCH)
            yield jax.block_until_ready(way(prompts.tokens[own], prompts.answer[own]))

    ways = {
        "clean evaluation": lambda tokens, answer: sweep.score(model, words, params, tokens, answer)["nll"],
        "prefill": lambda tokens, answer: prefilled(tokens),
        "knockouts": lambda t, a: tool.score(model, words, (1,), shared, t, a)["nll"][:, 1:],
        "a pass each": lambda t, a: jnp.stack([whole_pass(one, t, a) for one in where], axis=1),
    }
    samples = {name: each if name == "a pass each" else logical for name in ways}
    ours, theirs = (np.concatenate(list(run(ways[name], each))) for name in ("knockouts", "a pass each"))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(1 + repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            for _ in run(way, samples[name] if repeat else tool.BATCH):  # the first only compiles
                pass
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return {
        "model": variant,
        "knockouts": len(plan),
        "prompts": {name: residues * number for name, number in samples.items()},
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
    arguments.add_argument(
        "--each", type=int, help="how many of them get a forward pass for each knockout, a multiple of 8 (default all)"
    )
    arguments.add_argument("--repeats", type=int, default=5, help="timed runs of each way (default 5)")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = arguments.parse_args(argv)
    each = options.logical if options.each is None else options.each
    if options.repeats < 1:
        raise UserError(f"--repeats {options.repeats}: at least one is needed")
    for name, number in (("--logical", options.logical), ("--each", each)):
        if not 1 <= number <= options.logical or number % 8:
            raise UserError(
                f"{name} {number}: choose a multiple of 8, so that all batches are alike, and --each the less"
            )

    from experiments.runtime import prepare

    prepare(compilation_cache=False)
    rows = [measure(variant, options.logical, each, options.repeats) for variant in options.models]
    for row in rows:
        a_prompt = {name: value / row["prompts"][name] for name, value in row["seconds"].items()}
        clean, prefill = a_prompt["clean evaluation"], a_prompt["prefill"]
        print(f"{row['model']}, {row['knockouts']} knockouts")
        print(f"  {'':<18}{'prompts':>8}{'seconds':>9}   a prompt, of clean   of clean + prefill")
        for name, value in a_prompt.items():
            took = f"{row['prompts'][name]:>8}{row['seconds'][name]:>9.2f}"
            print(f"  {name:<18}{took}{value / clean:>21.2f}{value / (clean + prefill):>21.2f}")
        print(f"  largest difference of NLL: {row['largest_difference']:.1e} nats")
    if options.json:
        write_json(options.json, {"rows": rows})
    return 0
