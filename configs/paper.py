"""The family at the paper's scale: Qwen3-0.6B, 100B tokens in 47,518 steps of 512 sequences of 4,096 tokens.

    phase-jax fit --config=configs/paper.py:kvc_w8s8_1kv_baseline --topology v5e:16x16
    phase-jax train --config=configs/paper.py:kvc_w8s8_1kv_baseline --workdir=/shared/runs/w8s8 --pod

docs/pods.md has the commands for the corpus and for a pod.

The paper says the models, the tokens of a step and the steps. All else here is ours, and says so.
"""

import dataclasses

from ml_collections import ConfigDict

from configs.family import as_config_dict, default_seed, model_config
from phase_jax.data.corpus import TextConfig
from phase_jax.run import RunConfig, TrainConfig
from phase_jax.training.optimizer import OptimizerConfig

STEPS = 47_518  # the paper's: 99.65B tokens


def get_config(variant: str) -> ConfigDict:
    """The paper's run of one id."""
    run = RunConfig(
        id=variant,
        seed=default_seed(variant),
        # Ours: a block bounds memory and changes no number beyond rounding.
        model=dataclasses.replace(model_config(variant, "paper"), attention_block=256),
        # Ours: the paper does not name its data; 512 × 4,096 is our split of its 2.1M tokens a step.
        data=TextConfig(corpus="corpora/paper", tokenizer="qwen", length=4096),
        train=TrainConfig(
            steps=STEPS,
            batch=512,
            # Ours, all of it. The peak is what DeepSeek LLM's law (Bi et al. 2024) gives for 2.6e20 FLOPs, b2, decay
            # and clipping are usual at this size (Touvron et al. 2023).
            optimizer=OptimizerConfig(
                learning_rate=9e-4,
                warmup_steps=1000,
                schedule="cosine",
                final_share=0.1,
                b1=0.9,
                b2=0.95,
                weight_decay=0.1,
                clip_norm=1.0,
            ),
            checkpoint_every=500,
        ),
    )
    return as_config_dict(run)
