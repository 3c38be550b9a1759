"""phase-jax train: train one model, or continue its run."""

from collections.abc import Sequence
from pathlib import Path

from experiments.options import parser, run_config, split_config
from phase_jax.run import RunFolder


def main(argv: Sequence[str]) -> int:
    ours, rest = split_config(argv)
    arguments = parser(
        "train",
        "Train one model, or continue its run; --config.a.b=value changes any field.",
        "phase-jax train --config=configs/lab.py:kvc_w4s4_1kv --config.train.steps=500 --workdir=runs/w4s4",
    )
    arguments.add_argument("--config", metavar="FILE.py:ID", help="the run's configuration")
    arguments.add_argument("--workdir", type=Path, required=True, help="the run's folder")
    arguments.add_argument(
        "--init-from",
        metavar="FOLDER",
        help="begin with the parameters of a full-attention run, or of Qwen3's (a Hugging Face folder)",
    )
    arguments.add_argument("--profile", type=Path, metavar="DIR", help="write a profile of the run for XProf")
    arguments.add_argument(
        "--mesh",
        metavar="DATAxFSDPxTENSOR",
        help="how the devices share the work (default: 1xNx1 up to 16 of them, then more copies of that)",
    )
    arguments.add_argument(
        "--pod", action="store_true", help="join the other processes of a Cloud TPU pod; other launchers are recognised"
    )
    options = arguments.parse_args(rest)
    config = run_config(ours + ([f"--config.train.init_from={options.init_from}"] if options.init_from else []))

    from experiments.runtime import prepare, profiled
    from phase_jax.training.loop import train
    from phase_jax.training.processes import connect
    from phase_jax.training.sharding import make_mesh

    prepare()
    connect(options.pod)
    mesh = make_mesh(options.mesh)
    folder = RunFolder(options.workdir)
    done = folder.training.exists()
    with profiled(options.profile):
        result = train(config, folder, mesh)
    said = "was trained before; nothing to do" if done else f"trained in {result['seconds']:.0f} s"
    print(f"{folder.path}: {said}; {result['steps']} steps, validation loss {result['validation_loss']:.4f}")
    return 0
