"""phase-jax fit: compile a run's training step for TPUs that are not there, and say what it takes."""

import argparse
import dataclasses
import hashlib
import inspect
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from configs.family import FAMILY
from experiments import hlo
from experiments.options import parser, run_config, split_config
from phase_jax.errors import UserError
from phase_jax.interrupt import deferred_interrupt
from phase_jax.progress import console, progress_bar
from phase_jax.run import RunConfig, read_json, write_json

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jax.stages import Lowered, Traced

CONFIG = "--config=configs/paper.py"
GIB = 2**30


def trace(config: RunConfig, mesh: "Mesh", kernels: str | None = None) -> "Traced":
    """The training step of a run of next-token prediction on a mesh, as `train` makes it, traced for its devices.

    `kernels` is the implementation asked of them, as in `pallas_kernels.request`.
    Raises UserError for a run of another task, a batch that the mesh does not divide, or a call that Pallas, if it is
    asked for, cannot serve.
    """
    import jax
    import jax.numpy as jnp

    from pallas_kernels import request
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
    try:
        with request(kernels, platform(mesh)):
            return step.trace(state_shapes(model, optimizer, mesh), batch)
    except NotImplementedError as error:
        raise UserError(f"--kernels {kernels}: {error}") from error


def lower(config: RunConfig, mesh: "Mesh", kernels: str | None = None) -> "Lowered":
    """`trace`, lowered for the mesh's devices."""
    return trace(config, mesh, kernels).lower(lowering_platforms=(platform(mesh),))


def platform(mesh: "Mesh") -> str:
    return mesh.devices.flat[0].platform


def narrow(config: RunConfig, mesh: "Mesh") -> RunConfig:
    """The run at twice the length, with one sequence a chip and a model so narrow that, at a length of thousands, only
    what is quadratic in it is large; layers are still a loop, blocks and chunks as they were. (Kernels keep 128 lanes
    for one number of each query and head, which at the paper's length itself would be as large.)
    """
    model = config.model
    data = dataclasses.replace(config.data, length=2 * config.data.length)
    config = dataclasses.replace(config, data=data)
    small = dataclasses.replace(
        model,
        layers=min(5, model.layers),
        width=16,
        query_heads=2,
        kv_heads=min(2, model.kv_heads),
        head_dim=16,
        rope_dims=None if model.rope_dims is None else min(16, model.rope_dims),
        mlp_width=16,
        vocabulary=-(-entries(config) // 2),  # logits of all positions are quadratic, too
    )
    train = dataclasses.replace(config.train, batch=mesh.shape["data"] * mesh.shape["fsdp"])
    return dataclasses.replace(config, model=small, train=train)


def entries(config: RunConfig) -> int:
    """How many keys there are for queries to look at from afar: windows, or tokens in full attention."""
    windows, length = config.model.windows, config.data.length
    return windows.count(length) if windows else length


def quadratic_arrays(text: str, config: RunConfig) -> list[str]:
    """Shapes in the compiled program of a narrow run of arrays as large as scores of all queries and entries.

    Half as large, since causality leaves half. Size alone counts, so that neither layout, order of axes, tiling nor
    batching hides one: [T, J], [J, T], [T/256, J/256, 256, 256], [T·J] are the same.
    """
    least = config.data.length * entries(config) // 2
    instructions = (i for computation in hlo.parse(text)[0].values() for i in computation.values())
    shapes = {dims for i in instructions for dims, _, _ in hlo.arrays(i.shape)}
    return sorted(str(list(dims)) for dims in shapes if math.prod(dims) >= least)


def versions() -> dict[str, str]:
    """Of what compiles."""
    found = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return {name: found[name] for name in ("jax", "jaxlib", "libtpu") if name in found}


def measure(config: RunConfig, mesh: "Mesh", known: Sequence[dict] = (), kernels: str | None = None) -> dict:
    """Compiles the step, `kernels` as in `trace`, and says what it takes: bytes of one chip, FLOPs of all chips,
    seconds of compilation.

    One of the rows `known` where it is of the same program, made by the same versions.
    """
    import jax

    from pallas_kernels import traffic
    from phase_jax.model.flops import training_flops

    chips, traced = mesh.devices.size, trace(config, mesh, kernels)
    lowered = traced.lower(lowering_platforms=(platform(mesh),))
    made_of = [lowered.as_text(), mesh.devices.flat[0].device_kind, str(versions())]
    made_of += map(inspect.getsource, (hlo, traffic, narrow, entries, quadratic_arrays, measure))
    program = hashlib.sha256("".join(made_of).encode()).hexdigest()
    for row in known:
        if row.get("program") == program:
            return {**row, "id": config.id}
    row = {"id": config.id, "chips": chips, "mesh": "x".join(map(str, mesh.devices.shape)), "program": program}
    began = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed = re.search(r"([\d.]+)G\) exceeds", str(error))
        return {**row, "bytes_per_chip": needed and float(needed[1]) * GIB, "flops_per_step": None, "fits": False}
    seconds = time.perf_counter() - began
    memory, cost = compiled.memory_analysis(), hlo.program_cost(compiled.as_text())
    calls = traffic.traffic_of(traced.jaxpr)
    flops = (cost.flops + traffic.total_flops(calls)) * chips
    useful = training_flops(config.model, config.data.length) * config.train.batch * config.data.length
    small = narrow(config, mesh)
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
        "flops_per_step": flops,
        "model_flops_share": useful / flops,
        "bytes_moved": cost.bytes + traffic.total_bytes(calls),
        "bytes_sent": cost.sent,
        "compile_seconds": seconds,
        "quadratic_arrays": quadratic_arrays(lower(small, mesh, kernels).compile().as_text(), small),
        "fits": True,
    }


def table(rows: Sequence[dict], title: str) -> Table:
    """The rows as a table for people."""
    table = Table("id", title=title, box=box.SIMPLE_HEAD)
    for heading in "arguments,temporaries,peak,in all,FLOPs/step,model's,bytes moved,sent,compiled in".split(","):
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
            gib(row["bytes_sent"]),
            f"{row['compile_seconds']:.0f} s",
        )
    return table


def exceeds(row: dict, most: float) -> bool:
    """Whether a program needs more bytes for temporaries, or holds all scores or all logits at once."""
    return not row["fits"] or row["temporary_bytes"] > most or bool(row["quadratic_arrays"])


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def apart(commands: Mapping[str, Sequence[str]], at_once: int, folder: Path) -> Iterator[str]:
    """Runs commands of phase-jax, each in a process of its own, and yields the name of each as it ends.

    What they say on stderr lies in folder/NAME.log. Raises UserError with the end of it where one fails; the others are
    stopped then, as they are when the caller is.
    """
    waiting, running = list(commands), {}
    with deferred_interrupt() as interrupted:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    name = waiting.pop(0)
                    running[name] = _start(commands[name], folder / f"{name}.log")
                for name in [name for name, process in running.items() if process.poll() is not None]:
                    if code := running.pop(name).returncode:
                        said = (folder / f"{name}.log").read_text(errors="replace").strip().rpartition("\n")[2]
                        reason = said.removeprefix("phase-jax: ") if code > 0 else f"killed by signal {-code}"
                        raise UserError(f"{name}: {reason}")
                    yield name
                if interrupted():
                    raise KeyboardInterrupt
                time.sleep(0.1)
        finally:
            for process in running.values():
                process.kill()
                process.wait()


def _start(command: Sequence[str], log: Path) -> subprocess.Popen:
    """A command of phase-jax in a process that Ctrl-C does not reach."""
    line = [sys.executable, "-m", "experiments.cli", *command]
    with open(log, "wb") as file:
        return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True)


def kept_rows(file: Path | None) -> list[dict]:
    """What an earlier call wrote to --json. Raises UserError where that is no table of this command."""
    if file is None or not file.exists():
        return []
    found = read_json(file)
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise UserError(f"--json {file}: the file is there and not of phase-jax fit: choose another name")
    return found["rows"]


def main(argv: Sequence[str]) -> int:
    ours, rest = split_config(argv)
    arguments = parser(
        "fit",
        "Compile a run's training step for a TPU topology, without the hardware, and say what it takes: bytes of one"
        " chip, FLOPs of the step over all chips, the share of them that the model needs (the rest is computed twice"
        " or masked), bytes that one chip moves to and from its memory and sends to others.",
        "phase-jax fit --config=configs/paper.py:kvc_w8s8_1kv_baseline --topology v5e:16x16",
    )
    arguments.add_argument("--config", metavar="FILE.py:ID", help="the run's configuration")
    arguments.add_argument("--all", action="store_true", help=f"every id of the family ({CONFIG} by default)")
    arguments.add_argument(
        "--processes", type=int, default=2, metavar="N", help="of --all, at once, 2.5 GiB each (default %(default)s)"
    )
    arguments.add_argument("--topology", default="v5e:16x16", help="generation and chips (default %(default)s)")
    arguments.add_argument("--mesh", metavar="DATAxFSDPxTENSOR", help="as in train")
    arguments.add_argument(
        "--kernels",
        choices=("xla", "pallas"),
        help="their form (default: that of pallas_kernels/defaults.json)",
    )
    arguments.add_argument(
        "--max-temporaries",
        type=float,
        metavar="GB",
        help="exit 1 where a chip needs more (1 GB = 1e9 bytes) for temporaries, or an array is quadratic in length",
    )
    arguments.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows there; rows of equal programs that are there are kept"
    )
    options = arguments.parse_args(rest)
    rows = kept_rows(options.json)
    if options.all:
        rows = all_rows(ours, options, rows)
    else:
        from experiments.topology import topology_devices
        from phase_jax.training.sharding import make_mesh

        config, mesh = run_config(ours), make_mesh(options.mesh, topology_devices(options.topology))
        console.print(f"compiling {config.id} …")
        rows = [measure(config, mesh, rows, options.kernels)]
        store(options, rows)
    title = f"{options.topology}, mesh {rows[0]['mesh']}; memory and bytes moved and sent are of one chip"
    Console(width=None if sys.stdout.isatty() else 150).print(table(rows, title))
    too_large = [row["id"] for row in rows if options.max_temporaries and exceeds(row, 1e9 * options.max_temporaries)]
    for variant in too_large:
        print(f"phase-jax fit: {variant} needs too much: see its temporaries and quadratic arrays", file=sys.stderr)
    return 1 if too_large else 0


def store(options: argparse.Namespace, rows: Sequence[dict]) -> None:
    """Writes the rows where --json says."""
    if options.json:
        write_json(options.json, {"topology": options.topology, "versions": versions(), "rows": list(rows)})


def all_rows(ours: Sequence[str], options: argparse.Namespace, known: Sequence[dict]) -> list[dict]:
    """A row of every id, in the family's order; ids whose runs differ in the seed alone share a program.

    Rows are stored as they are made, and those of `known` that nothing replaces yet stay beside them.
    """
    file = next((a.partition(":")[0] for a in ours if a.startswith("--config=")), CONFIG)
    changes = [a for a in ours if not a.startswith("--config=")]
    same = {}
    for variant in FAMILY:
        run = dataclasses.replace(run_config([f"{file}:{variant}", *changes]), id="", seed=0)
        same.setdefault(run, []).append(variant)
    groups = {variants[0]: variants for variants in same.values()}
    rows = {row["id"]: row for row in known if row.get("id") in FAMILY}
    with TemporaryDirectory(prefix="phase-jax-fit-") as folder, progress_bar() as bar:
        parts = {first: Path(folder) / f"{first}.json" for first in groups}
        commands = {}
        for first, part in parts.items():
            write_json(part, {"rows": [row for row in known if row.get("id") == first]})
            where = ["--topology", options.topology, "--json", str(part)]
            where += ["--mesh", options.mesh] if options.mesh else []
            where += ["--kernels", options.kernels] if options.kernels else []
            commands[first] = ["fit", f"{file}:{first}", *changes, *where]
        task = bar.add_task("programs", total=len(groups), note="")
        bar.advance(task, 0)  # from here on time counts
        for first in apart(commands, options.processes, Path(folder)):
            (row,) = read_json(parts[first])["rows"]
            for variant in groups[first]:
                rows[variant] = {**row, "id": variant}
            store(options, [rows[variant] for variant in FAMILY if variant in rows])
            bar.update(task, advance=1, note=first)
    return [rows[variant] for variant in FAMILY]
