"""A run on text: killed anywhere it ends as if nothing had happened, and it names the data it stumbles over."""

import json
import re
import subprocess
import sys
from collections import deque
from functools import partial

import numpy as np
import pytest

from phase_jax.data.corpus import Corpus, TextConfig, write_corpus
from phase_jax.data.documents import python_documentation
from phase_jax.data.tokenizers import ByteTokenizer
from phase_jax.errors import UserError
from phase_jax.run import RunFolder
from phase_jax.training import loop
from phase_jax.training.feed import open_feed
from tests.runs import tiny_run
from tests.training.test_training import ROOT, assert_same_run, rows

LENGTH, BATCH = 16, 4


def text_run(corpus, **train):
    run = tiny_run(train={"first_layer_weight": 0.0, "validate_every": 6, **train}, model={"vocabulary": 258})
    return run.__class__(**{**vars(run), "data": TextConfig(str(corpus), length=LENGTH)})


def write(folder, documents):
    write_corpus(documents, ByteTokenizer(), folder, source="a test", record_tokens=2 * LENGTH, held_out=0.3)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    documents = [text[:200] for text in python_documentation()][:30]
    return write(tmp_path_factory.mktemp("text") / "corpus", documents)


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """A run that nothing stopped."""
    folder = RunFolder(tmp_path_factory.mktemp("whole") / "run")
    loop.train(text_run(corpus), folder)
    return folder


# Trains in a child that is killed when a save of that step has begun, or that step is in the metrics; then in one that
# is left alone. Arguments: the run's folder, its configuration as JSON, then where to kill.
KILLER = """
import json, os, signal, sys, time
from functools import partial
from pathlib import Path
from phase_jax.run import RunConfig, RunFolder
from phase_jax.training.loop import train

folder, config = RunFolder(Path(sys.argv[1])), RunConfig.from_dict(json.loads(sys.argv[2]))

def reached(where):
    kind, step = where.split(":")
    if kind == "save":
        return any(folder.checkpoints.glob(f"{step}.orbax-checkpoint-tmp*"))
    return folder.metrics.exists() and f'"step": {step},' in folder.metrics.read_text()

for where in [*sys.argv[3:], None]:
    child = os.fork()
    if child == 0:
        os.nice(10)  # so that the one who watches is in time
        train(config, folder)
        os._exit(0)
    while where and not reached(where):
        time.sleep(0.0005)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child ended before it was killed"
    if where:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert status == (signal.SIGKILL if where else 0), status
    print(where, sorted(path.name for path in folder.checkpoints.iterdir()))
"""


@pytest.mark.slow
def test_killed_at_steps_and_during_saves_it_ends_as_if_nothing_had_happened(corpus, whole, tmp_path):
    folder, config = RunFolder(tmp_path / "run"), text_run(corpus)
    kills = ["save:4", "step:7", "save:8"]
    killer = subprocess.run(
        [sys.executable, "-c", KILLER, str(folder.path), json.dumps(config.to_dict()), *kills],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert killer.returncode == 0, killer.stderr
    assert "orbax-checkpoint-tmp" in killer.stdout, "at least one save was cut short"
    assert_same_run(config, folder, whole)


def test_the_losses_are_of_held_out_text_and_begin_at_a_uniform_guess(whole):
    found = rows(whole)
    assert found[0]["loss"] == pytest.approx(np.log(258), rel=0.1)
    assert [row["step"] for row in found if "validation_loss" in row] == [6, 12]
    result = json.loads(whole.training.read_text())
    assert result["validation_loss"] == found[-1]["validation_loss"]


def test_every_process_reads_its_own_rows_of_the_same_batches(corpus, monkeypatch):
    def batches(processes):
        found = []
        for index in range(processes):
            own = partial(rows_of, processes, index)
            monkeypatch.setattr("phase_jax.training.feed.process_rows", own)
            feed = open_feed(text_run(corpus))
            # The rows are read in other threads: before this process becomes the next one.
            found.append([next(feed).tokens for _ in range(3)] + [batch.tokens for batch in feed.held_out()])
        return [np.concatenate(parts) for parts in zip(*found, strict=True)]

    def rows_of(processes, index, mesh, rows):
        return np.arange(rows).reshape(processes, -1)[index]

    for one, two in zip(batches(1), batches(2), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_feed_goes_on_from_its_state_in_another_process(corpus):
    feed, again = open_feed(text_run(corpus)), open_feed(text_run(corpus))
    for _ in range(5):
        next(feed)
    again.set_state(json.loads(json.dumps(feed.get_state())))
    for _ in range(4):
        np.testing.assert_array_equal(next(feed).tokens, next(again).tokens)


def test_what_a_run_stumbles_over_is_named(corpus, tmp_path, monkeypatch):
    """Step, the sequences of its batch, and the last good checkpoint; and nothing bad is saved."""
    folder, config, read = RunFolder(tmp_path / "run"), text_run(corpus), []
    real = loop._unhealthy

    def unhealthy(metrics, recent, spike):
        return real({**metrics, "loss": 50.0 if len(recent) == 9 else metrics["loss"]}, deque([4.0] * 64), spike)

    class Watched:
        def __init__(self, feed):
            self.feed = feed

        def __next__(self):
            read.append(next(self.feed))
            return read[-1]

        def __getattr__(self, name):
            return getattr(self.feed, name)

    monkeypatch.setattr(loop, "_unhealthy", unhealthy)
    monkeypatch.setattr(loop, "open_feed", lambda *args: Watched(open_feed(*args)))
    with pytest.raises(UserError) as error:
        loop.train(config, folder)
    said = str(error.value)
    assert "loss leapt from 4.000 (median of the 64 before) to 50.000 at step 10 of" in said
    assert f"the last good checkpoint is {folder.checkpoints / '8'}: try a lower" in said
    which = re.search(r"training sequences ([\d, ]+) of", said).group(1)
    named = Corpus(corpus).read("train", LENGTH, np.array([int(i) for i in which.split(", ")]))
    np.testing.assert_array_equal(named.tokens, read[9].tokens)
    assert not (folder.checkpoints / "12").exists()
    monkeypatch.undo()
    loop.train(config, folder)


@pytest.mark.parametrize(
    ("metrics", "recent", "said"),
    [
        ({"loss": 1.0, "grad_norm": float("inf")}, [], "grad_norm is inf"),
        ({"loss": float("nan")}, [1.0] * 64, "loss is nan"),
        ({"loss": 4.1}, [1.0] * 64, "loss leapt from 1.000"),
        ({"loss": 4.1}, [1.0] * 8, None),
        ({"loss": 3.9}, [1.0] * 64, None),
        ({"loss": 4.1}, [1.0, 9.0] * 31 + [5.0] * 3, None),
    ],
)
def test_a_loss_that_leaps_or_is_none_is_unhealthy(metrics, recent, said):
    found = loop._unhealthy(metrics, deque(recent), 3.0)
    assert found is None if said is None else found.startswith(said)


def test_a_run_does_not_go_on_with_another_corpus(corpus, tmp_path):
    feed = open_feed(text_run(corpus))
    state = feed.get_state()
    other = write(tmp_path / "corpus", list(python_documentation())[:3])
    with pytest.raises(UserError, match="is not the corpus that this run began with"):
        open_feed(text_run(other)).set_state(state)


def test_a_run_without_its_corpus_says_how_to_make_one(tmp_path):
    with pytest.raises(UserError, match=r"is no corpus .* make one with phase-jax corpus --out"):
        loop.train(text_run(tmp_path / "nowhere"), RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
