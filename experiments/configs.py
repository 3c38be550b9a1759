"""phase-jax configs: the model family, with what each model costs to keep."""

import dataclasses
import json
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from configs.family import FAMILY, model_config
from experiments.options import parser
from phase_jax.model.config import ModelConfig


def cache_bytes_per_token(config: ModelConfig) -> float:
    """Bytes of keys and values kept for each further token, over all layers: the entries' share (SPEC §1)."""
    bytes_each = {"float32": 4, "bfloat16": 2}[config.dtype]
    numbers = (1 if config.tied_kv else 2) * config.kv_heads * config.head_dim
    return config.layers * numbers * bytes_each / (config.stride or 1)


def parameter_count(config: ModelConfig) -> int:
    """Parameters, from shapes alone: no memory is taken."""
    import jax
    import jax.numpy as jnp

    from phase_jax.model import Transformer

    def init():
        return Transformer(config).init(jax.random.key(0), jnp.zeros((1, 2 * (config.window or 1)), jnp.int32))

    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(init)))


def row(variant: str, scale: str) -> dict:
    """What the table says of one id; `cache_ratio` is to full attention with as many KV heads."""
    config = model_config(variant, scale)
    full = dataclasses.replace(config, window=None, stride=None, tied_kv=False)
    return {
        "id": variant,
        "W": config.window,
        "S": config.stride,
        "kv_heads": config.kv_heads,
        "parameters": parameter_count(config),
        "cache_bytes_per_token": cache_bytes_per_token(config),
        "cache_ratio": cache_bytes_per_token(config) / cache_bytes_per_token(full),
    }


def main(argv: Sequence[str]) -> int:
    arguments = parser("configs", "List the model family.", "phase-jax configs --scale paper")
    arguments.add_argument("--scale", choices=["lab", "paper"], default="lab")
    arguments.add_argument("--json", action="store_true", help='print {"rows": [...]} instead of a table')
    options = arguments.parse_args(argv)
    rows = [row(variant, options.scale) for variant in FAMILY]
    if options.json:
        print(json.dumps({"rows": rows}, indent=1))
        return 0
    table = Table("id", title=f"the family at {options.scale} scale", box=box.SIMPLE_HEAD)
    for heading in ("W", "S", "KV heads", "parameters", "cache bytes/token", "of full attention"):
        table.add_column(heading, justify="right")
    for r in rows:
        geometry = ["–" if r[name] is None else str(r[name]) for name in ("W", "S")]
        sizes = [f"{r['parameters']:,}", f"{r['cache_bytes_per_token']:,.0f}", f"{r['cache_ratio']:.4f}"]
        table.add_row(r["id"], *geometry, str(r["kv_heads"]), *sizes)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0
