"""AdamW with warm-up, cosine decay, clipping, and weight decay on matrices only."""

import dataclasses

import jax
import optax


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Learning rate and its schedule; see the fields."""

    learning_rate: float = 3e-3
    warmup_steps: int = 100
    final_share: float = 0.1  # of the learning rate, at the last step
    b1: float = 0.9
    b2: float = 0.98
    weight_decay: float = 0.01
    clip_norm: float = 1.0


def decayed(params) -> dict:
    """Which parameters weight decay pulls on: matrices and maps, not norms or gate biases. Same tree, of bools."""

    def is_decayed(path, _):
        name = path[-1].key
        return not (name == "norm" or name == "bias" or name.endswith("_norm"))

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up, then cosine down to `final_share` of the peak at the last step."""
    warmup = min(config.warmup_steps, steps // 2)
    return optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warmup, max(steps, 1), config.final_share * config.learning_rate
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
