"""phase-jax fit: compile a run's training step for TPUs that are not there, and say what it takes."""

import dataclasses
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from configs.family import FAMILY
from experiments.hlo import arrays, program_cost
from experiments.options import parser, run_config, split_config
from phase_jax.errors import UserError
from phase_jax.progress import console
from phase_jax.run import RunConfig, write_json

if TYPE_CHECKING:
    from jax.sharding import Mesh

CONFIG = "--config=configs/paper.py"
GIB = 2**30


def lower(config: RunConfig, mesh: "Mesh", platform: str):
    """The training step of a run of next-token prediction on a mesh, as `train` makes it, lowered for a platform.

    Raises UserError for a run of another task, or a batch that the mesh does not divide.
    """
    import jax
    import jax.numpy as jnp

    from phase_jax.data.tokens import TokenBatch
    from phase_jax.model import Transformer
    from phase_jax.training.optimizer import make_optimizer
    from phase_jax.training.sharding import batch_sharding
    from phase_jax.training.step import make_train_step, state_shapes

    train, data = config.train, config.data
    if not hasattr(data, "corpus"):
        raise UserError(f"{config.id} does not train on text: take for example --config=configs/paper.py:{config.id}")
    model, optimizer = Transformer(config.model), make_optimizer(train.optimizer, train.steps)
    sharding = batch_sharding(mesh, train.batch)

    def array(dtype):
        return jax.ShapeDtypeStruct((train.batch, data.length), dtype, sharding=sharding)

    step = make_train_step(model, optimizer, train.first_layer_weight, train.z_weight, train.loss_chunk, mesh)
    batch = TokenBatch(array(jnp.int32), array(jnp.int32), array(jnp.bool_))
    return step.trace(state_shapes(model, optimizer, mesh), batch).lower(lowering_platforms=(platform,))


def quadratic_arrays(text: str, length: int) -> list[str]:
    """Shapes in a compiled program of arrays with two axes of `length` or more: all scores, or all logits, at once."""
    results = (line.split(" = ")[1].split("(")[0] for line in text.splitlines() if " = " in line)
    shapes = {dims for result in results for dims, _, _ in arrays(result)}
    return sorted(str(list(dims)) for dims in shapes if sum(size >= length for size in dims) > 1)


def measure(config: RunConfig, mesh: "Mesh") -> dict:
    """Compiles the step and says what it takes: bytes of one chip, FLOPs of all chips, seconds of compilation."""
    import jax

    from phase_jax.model.flops import training_flops

    chips, platform = mesh.devices.size, mesh.devices.flat[0].platform
    row = {"id": config.id, "chips": chips, "mesh": "x".join(map(str, mesh.devices.shape))}
    began = time.perf_counter()
    try:
        compiled = lower(config, mesh, platform).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed = re.search(r"([\d.]+)G\) exceeds", str(error))
        return {**row, "bytes_per_chip": needed and float(needed[1]) * GIB, "flops_per_step": None, "fits": False}
    seconds = time.perf_counter() - began
    text, memory = compiled.as_text(), compiled.memory_analysis()
    cost = program_cost(text)
    useful = training_flops(config.model, config.data.length) * config.train.batch * config.data.length
    return {
        **row,
        "bytes_per_chip": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "flops_per_step": cost.flops * chips,
        "model_flops_share": useful / (cost.flops * chips),
        "bytes_moved": cost.bytes,
        "compile_seconds": seconds,
        "quadratic_arrays": quadratic_arrays(text, config.data.length),
        "fits": True,
    }


def table(rows: Sequence[dict], title: str) -> Table:
    """The rows as a table for people."""
    table = Table("id", title=title, box=box.SIMPLE_HEAD)
    for heading in "arguments,temporaries,peak,in all,FLOPs/step,model's,bytes moved,compiled in".split(","):
        table.add_column(heading, justify="right")
    for row in rows:
        if not row["fits"]:
            table.add_row(row["id"], "does not fit", "", "", row["bytes_per_chip"] and gib(row["bytes_per_chip"]))
            continue
        table.add_row(
            row["id"],
            *(gib(row[name]) for name in ("argument_bytes", "temporary_bytes", "peak_bytes", "bytes_per_chip")),
            f"{row['flops_per_step']:.3g}",
            f"{row['model_flops_share']:.0%}",
            gib(row["bytes_moved"]),
            "the same program" if row["compile_seconds"] is None else f"{row['compile_seconds']:.0f} s",
        )
    return table


def exceeds(row: dict, most: float) -> bool:
    """Whether a program needs more bytes for temporaries, or holds all scores or all logits at once."""
    return not row["fits"] or row["temporary_bytes"] > most or bool(row["quadratic_arrays"])


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def main(argv: Sequence[str]) -> int:
    ours, rest = split_config(argv)
    arguments = parser(
        "fit",
        "Compile a run's training step for a TPU topology, without the hardware, and say what it takes: bytes of one"
        " chip, FLOPs of the step over all chips, the share of them that the model needs (the rest is computed twice"
        " or masked), bytes that one chip moves to and from its memory.",
        "phase-jax fit --config=configs/paper.py:kvc_w8s8_1kv_baseline --topology v5e:16x16",
    )
    arguments.add_argument("--config", metavar="FILE.py:ID", help="the run's configuration")
    arguments.add_argument("--all", action="store_true", help=f"every id of the family ({CONFIG} by default)")
    arguments.add_argument("--topology", default="v5e:16x16", help="generation and chips (default %(default)s)")
    arguments.add_argument("--mesh", metavar="DATAxFSDPxTENSOR", help="as in train")
    arguments.add_argument(
        "--max-temporaries",
        type=float,
        metavar="GB",
        help="exit 1 where a chip needs more (1 GB = 1e9 bytes) for temporaries, or an array is quadratic in length",
    )
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = arguments.parse_args(rest)
    if options.all:
        files = [a.partition(":")[0] for a in ours if a.startswith("--config=")] or [CONFIG]
        changes = [a for a in ours if not a.startswith("--config=")]
        configs = [run_config([f"{files[0]}:{variant}", *changes]) for variant in FAMILY]
    else:
        configs = [run_config(ours)]

    from experiments.topology import topology_devices
    from phase_jax.training.sharding import make_mesh

    mesh = make_mesh(options.mesh, topology_devices(options.topology))
    rows, known = [], {}
    for config in configs:
        same = dataclasses.replace(config, id="", seed=0)
        if same in known:
            row = {**known[same], "id": config.id, "compile_seconds": None}
        else:
            console.print(f"compiling {config.id} …")
            row = known[same] = measure(config, mesh)
        rows.append(row)
        if options.json:
            write_json(options.json, {"topology": options.topology, "rows": rows})
    title = f"{options.topology}, mesh {rows[0]['mesh']}; memory and bytes moved are of one chip"
    Console(width=None if sys.stdout.isatty() else 150).print(table(rows, title))
    too_large = [row["id"] for row in rows if options.max_temporaries and exceeds(row, 1e9 * options.max_temporaries)]
    for variant in too_large:
        print(f"phase-jax fit: {variant} needs too much: see its temporaries and quadratic arrays", file=sys.stderr)
    return 1 if too_large else 0
