"""What verbs share on the command line: the run configuration with its overrides, and where runs live."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from phase_jax.errors import UserError
from phase_jax.run import RunConfig


class _Parser(argparse.ArgumentParser):
    """Its mistakes are one line, like all others."""

    def error(self, message: str):
        raise UserError(f"{message}; {self.prog} --help has an example")


def parser(verb: str, purpose: str, example: str) -> argparse.ArgumentParser:
    """An argument parser whose --help ends with an example."""
    return _Parser(
        prog=f"phase-jax {verb}",
        description=purpose,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def run_with(config: ConfigDict, steps: int | None = None, seed: int | None = None) -> RunConfig:
    """A run with the command line's --steps and --seed, as far as they are given."""
    if steps is not None:
        config.train.steps = steps
    if seed is not None:
        config.seed = seed
    return RunConfig.from_dict(config.to_dict())


def split_config(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments that begin with --config, and the others."""
    ours = [argument for argument in argv if argument.startswith("--config")]
    return ours, [argument for argument in argv if not argument.startswith("--config")]


def run_config(arguments: Sequence[str]) -> RunConfig:
    """The run of `--config=FILE.py:ID` with `--config.a.b=value` overrides.

    Raises UserError for a file that is not there, an unknown id or key (the nearest name is offered) or a value of
    another type.
    """
    from absl import flags
    from ml_collections import config_flags

    named = next((argument for argument in arguments if argument.startswith("--config=")), None)
    if named is None:
        raise UserError("--config is missing: for example --config=configs/lab.py:kvc_w8s8_1kv_baseline")
    path, _, variant = named.removeprefix("--config=").partition(":")
    if not Path(path).is_file():
        raise UserError(
            f"--config={path}: there is no such file; the ones we ship are configs/lab.py and configs/paper.py"
        )
    if not variant:
        raise UserError(f"--config={path}: name a model id after a colon, as in {path}:kvc_w8s8_1kv_baseline")
    values = flags.FlagValues()
    command = ["phase-jax", *arguments]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=command)
    try:
        values(command)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        lines = str(error).strip("\"'").replace("\\n", "\n").splitlines()
        raise UserError(
            f"{' '.join(arguments)}: {'; '.join(line.strip() for line in lines if line.strip())}"
        ) from error
    return RunConfig.from_dict(values.config.to_dict())
