"""phase-jax export: a full-attention run's parameters as a Hugging Face folder of Qwen3's form."""

from collections.abc import Sequence
from pathlib import Path

from experiments.options import parser
from phase_jax.run import RunFolder


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "export",
        "Write a full-attention run's newest checkpoint as a Qwen3 folder that transformers loads: config.json and"
        " safetensors, in several files where it is large. The folder appears whole or not at all.",
        "phase-jax export --workdir=runs/reproduce/full_attn_1kv --out=full_attn_1kv-qwen3",
    )
    arguments.add_argument("--workdir", type=Path, required=True, help="the run's folder")
    arguments.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new, or empty")
    arguments.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of what is written (default float32, exact)",
    )
    options = arguments.parse_args(argv)

    import jax

    from phase_jax.model import qwen3
    from phase_jax.training.loop import load_params

    run = RunFolder(options.workdir)
    config = run.read_config()
    qwen3.check_writable(options.out, config.model)
    qwen3.write(options.out, config.model, jax.device_get(load_params(config, run)), options.dtype)
    files = sorted(options.out.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    print(f"{options.out}: {config.id}, {options.dtype}, {size / 2**20:.1f} MiB in {len(files)} file(s)")
    return 0
