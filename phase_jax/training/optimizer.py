"""AdamW with warm-up, decay, clipping, and weight decay on matrices only."""

import dataclasses
from typing import Literal

import jax
import optax

from phase_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Learning rate and its schedule; see the fields."""

    learning_rate: float = 3e-3
    warmup_steps: int = 100
    schedule: Literal["cosine", "wsd"] = "cosine"
    final_share: float = 0.1  # of the learning rate, at the last step
    decay_share: float = 0.2  # of the steps, those in which wsd goes down
    b1: float = 0.9
    b2: float = 0.98
    weight_decay: float = 0.01
    clip_norm: float = 1.0

    def __post_init__(self):
        if self.schedule not in ("cosine", "wsd"):
            raise UserError(f"train.optimizer.schedule is '{self.schedule}': choose cosine or wsd")
        if not 0 < self.decay_share <= 1:
            raise UserError(f"train.optimizer.decay_share is {self.decay_share}: it must be above 0 and at most 1")


def decayed(params) -> dict:
    """Which parameters weight decay pulls on: matrices and maps, not norms or gate biases. Same tree, of bools."""

    def is_decayed(path, _):
        name = path[-1].key
        return not (name == "norm" or name == "bias" or name.endswith("_norm"))

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up, then down to `final_share` of the peak at the last step.

    `cosine`: by half a cosine, from the warm-up on. `wsd` (warm-up, stable, decay; Hu et al. 2024): level, then in a
    straight line over the last `decay_share` of the steps, so that a run can be prolonged from before its decay.
    """
    peak, last = config.learning_rate, config.final_share * config.learning_rate
    warmup = min(config.warmup_steps, steps // 2)
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, 1), last)
    decay = max(1, min(round(config.decay_share * steps), steps - warmup))
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, last, decay),
        ],
        [warmup, steps - decay],
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer of a run of `steps` steps."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, steps),
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )
