"""A run: its frozen configuration, and the folder in which everything it makes is kept.

<workdir>/config.json            the configuration; a folder belongs to one configuration for good
          metrics.jsonl          one line every few steps: step, loss, accuracy, …
          training.json          written when training is complete: validation loss, times
          checkpoints/<step>/    Orbax
          evaluations/<protocol>.npz and .json    what was measured for every prompt, and the report
          evaluations/*.journal  what has been measured so far, while that is not all
          distance/distance.*    how accuracy depends on the target's distance from the query
          flip/<name>.*          what the completion flip showed
          interventions/<name>.npz and .json      what causal tools found, likewise
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from phase_jax.data.corpus import TextConfig
from phase_jax.data.prompts import RECORD_LENGTH, RESIDUES
from phase_jax.data.recall import RecallConfig
from phase_jax.errors import UserError
from phase_jax.model.config import ModelConfig
from phase_jax.training.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long and how a model is trained."""

    steps: int
    batch: int = 32
    first_layer_weight: float = 0.0  # of training.step.first_layer_loss, beside the task's loss
    z_weight: float = 0.0  # of the squared log-partition, beside the next-token loss
    loss_chunk: int = 256  # positions whose logits exist at once in the next-token loss
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    init_from: str | None = None  # a full-attention run's folder, or Qwen3's, whose parameters the run begins with
    log_every: int = 10
    checkpoint_every: int = 250
    keep_checkpoints: int = 3
    validation_batches: int = 32
    validate_every: int | None = None  # steps between validations; None: at the end alone
    loss_spike: float = 3.0  # nats above the median of the losses before it at which a run stops

    def __post_init__(self):
        for field in ("steps", "batch", "log_every", "checkpoint_every", "keep_checkpoints", "validation_batches"):
            if getattr(self, field) < 1:
                raise UserError(f"train.{field} is {getattr(self, field)}: it must be at least 1")
        if self.validate_every is not None and self.validate_every < 1:
            raise UserError(f"train.validate_every is {self.validate_every}: it must be at least 1, or null")
        if not self.loss_spike > 0:
            raise UserError(f"train.loss_spike is {self.loss_spike}: it must be more than 0 nats")
        if self.loss_chunk < 1:
            raise UserError(f"train.loss_chunk is {self.loss_chunk}: it must be at least 1")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that a run is a function of."""

    id: str
    seed: int
    model: ModelConfig
    data: RecallConfig | TextConfig
    train: TrainConfig

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Freezes nested dicts (a ConfigDict's, or config.json's). Raises UserError for what cannot be."""
        data, train = dict(values["data"]), dict(values["train"])
        train["optimizer"] = OptimizerConfig(**train["optimizer"])
        try:
            config = cls(
                values["id"], values["seed"], ModelConfig(**values["model"]), _task(data), TrainConfig(**train)
            )
        except ValueError as error:
            raise UserError(str(error)) from error
        if isinstance(config.data, RecallConfig):
            config.check_recall()
        return config

    def check_recall(self) -> None:
        """Raises UserError for a model that cannot be asked for what the recall task holds (SPEC §4)."""
        model, data = self.model, self.data
        if model.vocabulary < data.vocabulary.size:
            raise UserError(f"model.vocabulary {model.vocabulary} is smaller than the task's {data.vocabulary.size}")
        if model.windows is None:
            return
        if RESIDUES % model.stride:
            raise UserError(f"model.stride is {model.stride}: it must divide the {RESIDUES} residues of an evaluation")
        between, reach = RECORD_LENGTH * data.demonstrations + data.closing_filler, model.exact_branch.reach
        if between <= reach:
            raise UserError(
                f"data.demonstrations {data.demonstrations} and data.closing_filler {data.closing_filler} put {between}"
                f" tokens between records and query, which must be more than the {reach} that the exact branch reaches:"
                f" set data.closing_filler to {data.closing_filler + reach + 1 - between} or more"
            )

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


def _task(data: dict) -> RecallConfig | TextConfig:
    """Of a run's `data`: text where it names a corpus, else the recall task."""
    if "corpus" in data:
        return TextConfig(**data)
    return RecallConfig(**{**data, "curriculum": tuple(map(tuple, data["curriculum"]))})


def write_atomically(path: Path, text: str) -> None:
    """Writes a file whole or not at all, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically; NaN is refused, since it is no JSON."""
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The paths of a run's folder."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def training(self) -> Path:
        return self.path / "training.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def evaluation(self, protocol: str) -> Path:
        """Without its ending: `.npz` holds the prompts' scores, `.json` the report."""
        return self.path / "evaluations" / protocol

    def intervention(self, name: str) -> Path:
        """Without its ending: `.npz` holds arrays, `.json` the report."""
        return self.path / "interventions" / name

    @property
    def distance(self) -> Path:
        """As `evaluation`: no sweep over phases, so that reports and gates do not take it for one."""
        return self.path / "distance" / "distance"

    def claim(self, config: RunConfig) -> None:
        """Makes the folder this configuration's. Raises UserError where it is another's."""
        if self.config.exists():
            if differs := config_differences(read_json(self.config), config):
                raise UserError(
                    f"{self.path} holds a run of another configuration ({'; '.join(differs[:3])}):"
                    " choose another --workdir or remove that one"
                )
        elif self.path.exists() and any(self.path.iterdir()):
            raise UserError(f"{self.path} is not empty and holds no run: choose another --workdir")
        else:
            write_json(self.config, config.to_dict())

    def read_config(self) -> RunConfig:
        """The configuration of the run. Raises UserError where there is no run."""
        if not self.config.exists():
            raise UserError(f"{self.path} holds no run (no {self.config.name}): train one with phase-jax train")
        try:
            return RunConfig.from_dict(read_json(self.config))
        except (KeyError, TypeError) as error:
            raise UserError(f"{self.config} is no run's configuration ({error}): choose the folder of a run") from None


def read_json(path: Path) -> Any:
    """Raises UserError for a file that is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}): remove it and run the command again") from error


def config_differences(found: dict, wanted: RunConfig) -> list[str]:
    """`path: found, not wanted` of every field in which a stored configuration differs; none it lacks has a default."""
    with suppress(UserError, KeyError, TypeError):  # what is no configuration of ours is compared as it is
        found = RunConfig.from_dict(found).to_dict()
    return _differences(json.loads(json.dumps(found)), json.loads(json.dumps(wanted.to_dict())))


def _differences(found: dict, wanted: dict, prefix: str = "") -> list[str]:
    """`path: found, not wanted` of every leaf in which two nested dicts differ."""
    lines = []
    for key in sorted({*found, *wanted}):
        a, b = found.get(key), wanted.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key} is {a}, not {b}")
    return lines
