"""A made-up folder of measured runs, as phase-jax reproduce leaves one: small, and nothing is trained."""

import json
from pathlib import Path

import numpy as np

from configs import lab
from phase_jax.run import RunConfig, RunFolder, write_json
from phase_jax.statistics import phase_report, simulate

RESIDUES, LOGICAL = 24, 40
PHASES = {  # the true accuracy of every phase
    "full_attn_1kv": [0.9],
    "kvc_w8s8_1kv_baseline": [0.1, 0.1, 0.95, 0.1, 0.1, 0.95, 0.1, 0.1],
}


def write_run(path: Path, model: str, protocols=("prefix", "insequence"), seed: int = 42) -> Path:
    """A run folder of `model`, measured under `protocols`, whose weights do not exist."""
    values = lab.get_config(model)
    values.seed = seed
    config = RunConfig.from_dict(values.to_dict())
    folder = RunFolder(path)
    write_json(folder.config, json.loads(json.dumps(config.to_dict())))
    write_json(folder.training, {"steps": config.train.steps, "validation_loss": 0.4, "seconds": 1.0})
    rng = np.random.default_rng(seed)
    truth = np.tile(PHASES[model], RESIDUES // len(PHASES[model]))
    for protocol in protocols:
        correct = simulate(truth, LOGICAL, 0.3, rng)
        nll = np.where(correct, 0.1, 2.5) + 0.1 * rng.exponential(size=correct.shape)
        report = phase_report(
            correct,
            config.model.stride,
            replicates=100,
            permutations=2000,
            nll=nll,
            model=model,
            width=config.model.window,
            kv_heads=config.model.kv_heads,
            protocol=protocol,
            validation_loss=0.4,
        ).to_dict()
        report |= {"prompt_seed": 0, "prompt_length": 104, "checks": {"matched": True, "mean_deviation": 0.0}}
        target = folder.evaluation(protocol)
        write_json(target.with_suffix(".json"), report)
        np.savez_compressed(target.with_suffix(".npz"), correct=correct, nll=nll)
    return path


def write_lab(path: Path) -> Path:
    """Two runs and their summary."""
    for model in PHASES:
        write_run(path / model, model)
    reports = [json.loads(file.read_text()) for file in sorted(path.glob("*/evaluations/*.json"))]
    write_json(path / "summary.json", {"reports": reports})
    return path
