"""What a compiled program costs, against counts by hand; the verb and its mistakes."""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from configs.family import FAMILY
from experiments import cli, fit, topology
from experiments.bench_peers import Size, forward_flops
from experiments.hlo import Cost, arrays, kernels_vmem, moved, program_cost
from phase_jax.data.corpus import TextConfig
from phase_jax.errors import UserError
from phase_jax.model import Transformer
from phase_jax.run import RunConfig, TrainConfig
from phase_jax.training.sharding import make_mesh
from tests.model.tiny import tiny_config

ROOT = Path(__file__).parents[2]
B, T, D, F, V, N, H, LAYERS = 4, 96, 32, 48, 320, 4, 16, 6


def small_run(variant: str, length: int = T, **changes) -> RunConfig:
    """A model of six layers in a loop, which are computed again in the backward pass."""
    sizes = {"layers": LAYERS, "width": D, "mlp_width": F, "vocabulary": V, "query_heads": N, "head_dim": H}
    model = tiny_config(variant, **{**sizes, "remat": True, **changes})
    return RunConfig(variant, 0, model, TextConfig("none", length=length), TrainConfig(steps=2, batch=B, loss_chunk=32))


def compiled_text(run: RunConfig) -> str:
    return fit.lower(run, make_mesh(devices=jax.devices()[:1])).compile().as_text()


@pytest.fixture(scope="module")
def full():
    return compiled_text(small_run("full_attn_1kv"))


def test_flops_of_full_attention_in_a_loop_are_within_5_percent_of_a_count_by_hand(full):
    layer = D * N * H + 2 * D * H + N * H * D + 3 * D * F + 2 * N * H * T  # dense: all pairs are scored
    # Forward, again in the backward pass, and twice for gradients; the logits are not computed again.
    by_hand = 2 * B * T * (4 * LAYERS * layer + 3 * V * D)
    assert program_cost(full).flops == pytest.approx(by_hand, rel=0.05)


def test_flops_of_compression_in_a_loop_are_within_5_percent_of_a_count_by_hand():
    text = compiled_text(small_run("kvc_w8s8_1kv_vector"))
    keys = T // 8 + 2 * 8  # entries, and a block of exact tokens with the one before it
    maps = 2 * D * (H + H)
    layer = D * N * H + 2 * D * H + maps + N * H * D + 3 * D * F + 2 * N * H * keys
    assert program_cost(text).flops == pytest.approx(2 * B * T * (4 * LAYERS * layer + 3 * V * D), rel=0.05)


@pytest.mark.parametrize("layers", [1, 2, LAYERS])
def test_where_only_the_last_logits_are_wanted_the_last_layer_asks_once(layers):
    """The FLOPs of the compiled program are those that `bench peers` says the result needs, and the masked scores."""
    config = small_run("full_attn_1kv", layers=layers, remat=False).model
    size = Size(config, length=T, batch=B, steps=1, sweeps=1)
    model, tokens = Transformer(config), jnp.zeros((B, T), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    run = jax.jit(lambda params, tokens: model.apply(params, tokens, last_only=True))
    masked = (layers - 1) * B * T * 2 * N * H * (T - 1)
    counted = program_cost(run.lower(params, tokens).compile().as_text()).flops
    assert counted == pytest.approx(forward_flops(size) + masked, rel=0.01)


def test_without_a_loop_flops_are_those_of_xlas_analysis():
    def f(a, b, c):
        return jnp.einsum("bij,bjk->bik", a, b) @ c

    shapes = [(3, 20, 30), (3, 30, 40), (40, 50)]
    compiled = jax.jit(f).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()
    assert program_cost(compiled.as_text()).flops == 2 * 3 * (20 * 30 * 40 + 20 * 40 * 50)
    assert program_cost(compiled.as_text()).flops == pytest.approx(compiled.cost_analysis()["flops"], rel=0.01)


# As XLA writes it for TPUs: a product for each of 8 heads as one convolution; and a loop without an annotation.
TPU = """
HloModule jit_f, is_scheduled=true

%body (p.1: CARRY) -> CARRY {
  %p.1 = CARRY parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %a = bf16[8,64,32]{2,1,0:T(8,128)(2,1)} get-tuple-element(%p.1), index=1
  %b = bf16[8,32,16]{2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%p.1), index=2
  %d = f32[8,64,16]{2,1,0:T(8,128)} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf
  ROOT %t = CARRY tuple(%i, %a, %b, %d)
}

%condition (p.2: CARRY) -> pred[] {
  %bound = s32[]{:T(128)} constant(28)
  %p.2 = CARRY parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  ROOT %less = pred[]{:T(512)} compare(%j, %bound), direction=LT
}

ENTRY %main (x: CARRY) -> CARRY {
  %x = CARRY parameter(0)
  ROOT %loop = CARRY while(%x), condition=%condition, body=%body
}
""".replace("CARRY", "(s32[], bf16[8,64,32]{2,1,0}, bf16[8,32,16]{2,1,0}, f32[8,64,16]{2,1,0})")


def test_a_tpus_batched_product_in_a_loop():
    # The right factor is in fast memory (S(1)) and moves nothing; the comparison reads 8 bytes and writes one.
    expected = Cost(28 * 2 * 8 * 64 * 32 * 16, 28 * (2 * 8 * 64 * 32 + 4 * 8 * 64 * 16 + 9))
    assert program_cost(TPU) == expected
    with pytest.raises(ValueError, match="its trips are unknown"):
        program_cost(TPU.replace("constant(28)", "parameter(1)"))


# As XLA names collectives on TPUs: one that begins, goes on beside other work and ends; and a reduce-scatter.
COLLECTIVES = """
HloModule jit_g, is_scheduled=true

%gather (p.1: f32[8,16]) -> f32[32,16] {
  %p.1 = f32[8,16]{1,0} parameter(0)
  ROOT %all-gather.1 = f32[32,16]{1,0} all-gather(%p.1), replica_groups=GROUPS, dimensions={0}
}

%async_collective_fusion.1 (p.2: f32[8,16]) -> f32[32,16] {
  %p.2 = f32[8,16]{1,0} parameter(0)
  ROOT %all-gather.2 = f32[32,16]{1,0} all-gather(%p.2), replica_groups=GROUPS, dimensions={0}
}

%all-reduce-scatter.1 (p.3: f32[32,16]) -> f32[8,16] {
  %p.3 = f32[32,16]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %all-reduce.1 = f32[32,16]{1,0} all-reduce(%p.3), replica_groups=GROUPS, to_apply=%add
  ROOT %own = f32[8,16]{1,0} dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={8,16}
}

ENTRY %main (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %async-collective-start.1 = f32[32,16]{1,0} fusion(%x), kind=kCustom, calls=%gather
  %meanwhile = f32[32,16]{1,0} fusion(%x), kind=kCustom, calls=%async_collective_fusion.1
  %async-collective-done.1 = f32[32,16]{1,0} fusion(%x), kind=kCustom, calls=%gather
  ROOT %scatter = f32[8,16]{1,0} fusion(%async-collective-done.1), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


@pytest.mark.parametrize("groups", ["[2,4]<=[8]", "{{0,1,2,3},{4,5,6,7}}", "mesh[data=2,fsdp=4] {fsdp}"])
def test_a_collective_beside_other_work_sends_once_and_a_reduce_scatter_half_of_an_all_reduce(groups):
    # In a ring of four each gives its eight rows to three others; and three of four parts of 32 partial sums.
    assert program_cost(COLLECTIVES.replace("GROUPS", groups)).sent == 3 * 4 * 8 * 16 + 3 / 4 * 4 * 32 * 16


def test_shapes_are_read():
    shape = "(pred[3,4]{1,0:T(8,128)S(1)}, /*index=1*/bf16[5]{0}, s4[6]{0}, f32[])"
    assert list(arrays(shape)) == [((3, 4), 12, False), ((5,), 10, True), ((6,), 3, True), ((), 4, True)]
    assert moved(shape) == 17


def test_the_memory_of_a_kernel_is_read_though_its_metadata_has_lines_of_its_own():
    text = """ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"}]}
}
"""
    assert kernels_vmem(text) == 4096 and program_cost(text).bytes == 0


def test_an_array_that_a_loop_adds_rows_to_is_not_counted_whole_each_time():
    rows, width, updates = 4096, 64, 512
    run = jax.jit(lambda x, at, new: x.at[at].add(new))
    shapes = [((rows, width), jnp.float32), ((updates,), jnp.int32), ((updates, width), jnp.float32)]
    compiled = run.lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).compile()
    assert program_cost(compiled.as_text()).bytes < 10 * 4 * rows * width


LONG = 2048


def narrow_run(variant: str, **changes) -> RunConfig:
    return fit.narrow(small_run(variant, LONG // 2, **changes), make_mesh(devices=jax.devices()[:1]))


@pytest.mark.parametrize("entries", [LONG, LONG // 4 - 1], ids=["[T, T]", "[T, J]"])
@pytest.mark.parametrize(
    "shape", ["tj", "jt", "bntj", "ntbj", "t,j", "bncjt"], ids=lambda axes: axes.replace("c", "c(t)")
)
def test_scores_of_all_queries_are_found_in_any_form(entries, shape):
    """Transposed, of heads and batches, flat, in blocks of queries."""
    run = narrow_run("full_attn_1kv" if entries == LONG else "kvc_w8s4")
    sizes = {"b": 1, "n": 2, "c": LONG // 64, "t": 64 if "c" in shape else LONG, "j": entries}

    def scores(x):
        return jnp.exp(x).reshape(-1) if "," in shape else jnp.exp(x)

    def text(**smaller):
        full = [{**sizes, **smaller}[axis] for axis in shape.replace(",", "")]
        return jax.jit(scores).lower(jax.ShapeDtypeStruct(full, jnp.float32)).compile().as_text()

    assert fit.quadratic_arrays(text(), run)
    assert not fit.quadratic_arrays(text(t=sizes["t"] // 8), run), "of few queries"


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["full_attn_1kv", "kvc_w8s4"])
def test_a_training_step_that_scores_all_pairs_is_found_and_blocks_have_none(variant):
    dense, blocks = (narrow_run(variant, attention_block=block) for block in (None, 128))
    assert fit.quadratic_arrays(compiled_text(dense), dense)
    assert fit.quadratic_arrays(compiled_text(blocks), blocks) == []


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(topology, "topology_devices", lambda name: jax.devices()[:1])


def row_of(variant: str, **changes) -> dict:
    """As `measure` makes them."""
    sizes = dict.fromkeys((f"{name}_bytes" for name in ("argument", "temporary", "peak")), 1.0)
    moved = {"bytes_moved": 1.0, "bytes_sent": 1.0, "quadratic_arrays": [], "fits": True}
    shape = {"id": variant, "chips": 1, "mesh": "1x1x1", "bytes_per_chip": 2**30, "flops_per_step": 1e15}
    return {**shape, **sizes, **moved, "model_flops_share": 0.5, "compile_seconds": 1.0, **changes}


@pytest.fixture
def started(monkeypatch):
    """Names of the ids whose programs would be compiled; `stop_after` as many it is as if Ctrl-C came."""
    started = []

    def apart(commands, at_once, folder):
        for variant, command in commands.items():
            if len(started) == apart.stop_after:
                raise KeyboardInterrupt
            part = Path(command[command.index("--json") + 1])
            (kept,) = json.loads(part.read_text())["rows"] or [None]
            if kept is None:
                started.append(variant)
                part.write_text(json.dumps({"rows": [row_of(variant)]}))
            yield variant

    apart.stop_after = None
    monkeypatch.setattr(fit, "apart", apart)
    return started


def test_equal_programs_compile_once_and_what_is_done_is_kept(started, tmp_path, capsys):
    out = tmp_path / "fit.json"
    fit.apart.stop_after = 9
    assert cli.main(["fit", "--all", "--json", str(out)]) == 130
    done = [row["id"] for row in json.loads(out.read_text())["rows"]]
    assert len(started) == 9 and len(done) == 12, "three differ from the reference model in the seed alone"
    fit.apart.stop_after = None
    assert cli.main(["fit", "--all", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["id"] for row in rows] == list(FAMILY)
    assert all({"bytes_per_chip", "flops_per_step", "fits"} <= set(row) for row in rows)
    assert len(started) == 24 and len(set(started)) == 24
    assert "kvc_w8s8_1kv_baseline_seed45" in capsys.readouterr().out


def test_a_program_that_needs_too_much_fails(on_cpu, monkeypatch, capsys):
    command = ["fit", "--config=configs/paper.py:kvc_w8s6", "--max-temporaries", "4"]
    for changes, code in (({}, 0), ({"temporary_bytes": 4.1e9}, 1), ({"quadratic_arrays": ["[4096, 682]"]}, 1)):
        row = row_of("kvc_w8s6", **changes)
        monkeypatch.setattr(fit, "measure", lambda config, mesh, known, kernels, row=row: row)
        assert cli.main(command) == code
        assert ("kvc_w8s6 needs too much" in capsys.readouterr().err) == bool(code)


def test_a_row_of_the_same_program_is_kept_and_no_other(monkeypatch):
    """Whether it is the same decides what is lowered and what compiles it, not the id."""
    mesh, run = make_mesh(devices=jax.devices()[:1]), small_run("full_attn_1kv", layers=1)
    row = fit.measure(run, mesh)
    assert row["fits"] and row["compile_seconds"] > 0
    compiled = []
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered: compiled.append(lowered) or 1 / 0)
    assert fit.measure(dataclasses.replace(run, id="b", seed=1), mesh, [row]) == {**row, "id": "b"}
    assert not compiled
    with pytest.raises(ZeroDivisionError):
        fit.measure(small_run("full_attn_1kv", layers=2), mesh, [row])
    monkeypatch.setattr(fit, "versions", lambda: {"jax": "0.0.0"})
    with pytest.raises(ZeroDivisionError):
        fit.measure(run, mesh, [row])


def test_commands_run_apart_so_many_at_once(tmp_path, monkeypatch):
    """Each is a process; one that fails says why, and its fellows are stopped."""
    script = tmp_path / "command.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "here, verb = pathlib.Path(sys.argv[0]).parent, sys.argv[-1]\n"
        "(here / f'{os.getpid()}.running').touch()\n"
        "count = len(list(here.glob('*.running')))\n"
        "(here / f'{os.getpid()}.count').write_text(str(count))\n"
        "if verb == 'fail': sys.exit('phase-jax: no such thing')\n"
        "time.sleep(60 if verb == 'sleep' else 0.2)\n"
        "(here / f'{os.getpid()}.running').unlink()\n"
    )
    started, popen = [], subprocess.Popen

    def run(command, **more):
        started.append(popen([sys.executable, str(script), *command[3:]], **more))
        return started[-1]

    monkeypatch.setattr(fit.subprocess, "Popen", run)
    names = [str(n) for n in range(5)]
    assert sorted(fit.apart({name: ["work"] for name in names}, 2, tmp_path)) == names
    assert max(int(file.read_text()) for file in tmp_path.glob("*.count")) <= 2
    with pytest.raises(UserError, match=r"^b: no such thing$"):
        list(fit.apart({"a": ["sleep"], "b": ["fail"], "c": ["work"]}, 2, tmp_path))
    assert all(process.poll() is not None for process in started) and len(started) == 7, "c never starts"
    begun = fit.apart({"a": ["sleep"], "b": ["work"]}, 2, tmp_path)
    assert next(begun) == "b"
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        next(begun)
    assert started[-2].poll() is not None and len(started) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=configs/lab.py:kvc_w8s8_1kv_baseline"], "does not train on text"),
        (["--config=configs/paper.py:kvc_w8s8_1kv_baseline", "--mesh", "2x2x1"], "4 places and there are 1 devices"),
        ([], "--config is missing"),
    ],
)
def test_mistakes_are_one_line(on_cpu, arguments, message, capsys):
    assert cli.main(["fit", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("phase-jax: ") == 1


def test_without_libtpu_one_line_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["fit", "--config=configs/paper.py:kvc_w8s8_1kv_baseline"]) == 2
    assert "libtpu is not installed: make extras EXTRAS=tpu brings it" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu")
def test_a_small_model_compiles_for_four_chips_and_an_unknown_topology_is_refused(tmp_path):
    def command(*arguments):
        line = [sys.executable, "-m", "experiments.cli", "fit", *arguments]
        return subprocess.run(line, cwd=ROOT, env=os.environ, capture_output=True, text=True)

    sizes = {"layers": 5, "width": 128, "mlp_width": 256, "vocabulary": 512, "query_heads": 4, "head_dim": 32}
    flags = [f"--config.model.{name}={value}" for name, value in sizes.items()]
    flags += ["--config.train.batch=8", "--config.data.length=4096", "--config.model.attention_block=128"]
    run = ["--config=configs/paper.py:kvc_w8s8_1kv_baseline", *flags]
    done = command(*run, "--topology", "v5e:2x2", "--json", str(tmp_path / "fit.json"))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "fit.json").read_text())["rows"]
    assert row["fits"] and row["chips"] == 4 and not row["quadratic_arrays"]
    assert 0.2 < row["model_flops_share"] < 1 and 0 < row["argument_bytes"] < row["bytes_per_chip"]
    refused = command(*run, "--topology", "v5e:3x7")
    assert refused.returncode == 2 and "topology 'v5e:3x7'" in refused.stderr
