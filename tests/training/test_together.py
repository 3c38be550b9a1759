"""Seeds that train in one call: the same runs as apart, wherever they are stopped."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from phase_jax.errors import UserError
from phase_jax.run import RunFolder
from phase_jax.training import loop
from tests.runs import tiny_run

SEEDS = (7, 8, 9)


def configs():
    train = {"steps": 50, "checkpoint_every": 20, "first_layer_weight": 0.0}
    run = tiny_run(train=train, data={"curriculum": ((1.0, 4, 28),)})
    return [dataclasses.replace(run, seed=seed) for seed in SEEDS]


def losses(folder):
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return np.array([line["loss"] for line in lines])


def assert_same(config, one, other):
    assert losses(one).shape == (50,)
    np.testing.assert_allclose(losses(one), losses(other), rtol=0, atol=1e-6)
    parameters = [loop.load_params(config, folder) for folder in (one, other)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *parameters)
    stored = [json.loads(folder.training.read_text())["validation_loss"] for folder in (one, other)]
    assert stored[0] == pytest.approx(stored[1], abs=1e-6)


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    place = tmp_path_factory.mktemp("apart")
    folders = [RunFolder(place / str(seed)) for seed in SEEDS]
    for config, folder in zip(configs(), folders, strict=True):
        loop.train(config, folder)
    return folders


@pytest.mark.slow
def test_seeds_together_equal_each_alone_and_a_laggard_catches_up(apart, tmp_path):
    together = [RunFolder(tmp_path / str(seed)) for seed in SEEDS]
    results = loop.train_together(configs(), together)
    assert [result["resumed_from"] for result in results] == [None] * 3
    for config, one, other in zip(configs(), together, apart, strict=True):
        assert_same(config, one, other)
    assert not np.allclose(losses(together[0]), losses(together[1])), "each seed has its own data and weights"

    # As a kill between the saves of two runs leaves them: one is at step 20, one at 40, one is done.
    for folder, gone in ((together[0], ("40", "50")), (together[1], ("50",))):
        folder.training.unlink()
        for step in gone:
            shutil.rmtree(folder.checkpoints / step)
    results = loop.train_together(configs(), together)
    assert [result["resumed_from"] for result in results] == [20, 40, None]
    for config, one, other in zip(configs(), together, apart, strict=True):
        assert_same(config, one, other)


def test_runs_that_differ_in_more_than_their_seeds_are_refused(tmp_path):
    other = tiny_run(train={"steps": 13})
    with pytest.raises(UserError, match="differ in their seeds alone"):
        loop.train_together([tiny_run(), other], [RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")])
    assert not list(tmp_path.iterdir())
