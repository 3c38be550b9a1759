"""Evaluations that are killed, fail in part, go on, and run on eight devices: the same numbers, each made once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from phase_jax.errors import UserError
from phase_jax.evaluation.runner import fingerprint, score_samples
from phase_jax.evaluation.sweep import sweep
from phase_jax.model import Transformer
from tests.evaluation.test_sweep import VOCABULARY, prompts_of
from tests.model.tiny import draw_params, tiny_config

ROOT = Path(__file__).parents[2]
N, BATCH = 11, 3


def samples(n=N):
    """n samples of six ids and a number, all different."""
    ids = np.random.default_rng(0).integers(0, 99, (n, 6))
    return [(row, np.int64(i)) for i, row in enumerate(ids)]


def expected(n=N):
    return {"sum": [int(ids.sum()) for ids, _ in samples(n)], "number": list(range(n))}


class Scorer:
    """Sums ids; remembers which numbers it met, batch by batch, and fails on those in `fails`."""

    def __init__(self, fails=()):
        self.fails, self.met = set(fails), []

    def __call__(self, ids, number):
        self.met.append(number.tolist())
        if self.fails & set(number.tolist()):
            raise MemoryError("out of memory\nwith details")
        return {"sum": ids.sum(axis=1), "number": number}


def run(scorer, given=None, *, total=N, journal=None, made_of=b"made of this"):
    given = samples() if given is None else given
    return score_samples(scorer, given, total, batch=BATCH, made_of=made_of, label="test", journal=journal)


def lists(scores):
    return {name: values.tolist() for name, values in scores.items()}


def test_all_samples_in_their_order_in_batches_of_one_shape():
    scorer = Scorer()
    assert lists(run(scorer)) == expected()
    assert scorer.met == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 10]]


def test_a_second_run_scores_nothing_again(tmp_path):
    journal = tmp_path / "journal"
    run(Scorer(), journal=journal)
    again = Scorer()
    assert lists(run(again, journal=journal)) == expected()
    assert again.met == []


def test_other_ids_another_checkpoint_or_another_config_are_scored(tmp_path):
    journal, params = tmp_path / "journal", {"a": np.ones(3, np.float32)}
    made_of = fingerprint({"model": 1}, params)
    run(Scorer(), journal=journal, made_of=made_of)
    others = [
        fingerprint({"model": 2}, params),
        fingerprint({"model": 1}, {"a": np.float32([1, 1, 1 + 1e-6])}),
        fingerprint({"model": 1}, {"b": params["a"]}),
        fingerprint({"model": 1}, {"a": params["a"].astype(np.float64)}),
    ]
    for other in others:
        scorer = Scorer()
        run(scorer, journal=journal, made_of=other)
        assert len(scorer.met) == 4
    changed = samples()
    changed[4][0][2] += 1
    scorer = Scorer()
    scores = run(scorer, changed, journal=journal, made_of=made_of)
    assert scorer.met == [[4, 4, 4]]
    assert scores["sum"][4] == expected()["sum"][4] + 1


def test_more_samples_cost_only_themselves(tmp_path):
    journal = tmp_path / "journal"
    run(Scorer(), samples()[:5], total=5, journal=journal)
    scorer = Scorer()
    assert lists(run(scorer, journal=journal)) == expected()
    assert [number for batch in scorer.met for number in batch] == list(range(5, N))


def test_equal_samples_are_scored_once():
    scorer = Scorer()
    scores = run(scorer, [samples()[i] for i in (0, 1, 0, 1, 2, 0)], total=6)
    assert scorer.met == [[0, 1, 2]]
    assert scores["number"].tolist() == [0, 1, 0, 1, 2, 0]


def test_a_failed_batch_is_named_counted_and_tried_again(tmp_path, capsys):
    journal, scorer = tmp_path / "journal", Scorer(fails=[4, 10])
    with pytest.raises(UserError) as raised:
        run(scorer, journal=journal)
    assert str(raised.value) == (
        "test: 5 of 11 logical samples are missing, so there is no result: logical samples 3 to 5 (MemoryError: out of"
        " memory); logical samples 9 to 10 (MemoryError: out of memory); the same command tries them again"
    )
    assert len(scorer.met) == 4, "the batches after a failed one are scored"
    assert "logical samples 3 to 5 failed" in " ".join(capsys.readouterr().err.split())
    again = Scorer()
    assert lists(run(again, journal=journal)) == expected()
    assert again.met == [[3, 4, 5], [9, 10, 10]]


def test_numbers_that_are_none_count_as_failed():
    def score(ids, number):
        return {"nll": np.where(number == 7, np.nan, 1.0)}

    with pytest.raises(UserError, match=r"3 of 11 logical samples are missing.*6 to 8.*nll is not a finite number"):
        run(score)


def test_where_everything_fails_the_error_is_shown_as_it_is():
    with pytest.raises(MemoryError):
        run(Scorer(fails=range(N)))


def test_an_interrupt_lets_the_batch_finish_and_the_next_run_go_on(tmp_path, capsys):
    journal = tmp_path / "journal"

    class Interrupted(Scorer):
        def __call__(self, ids, number):
            if 4 in number:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__call__(ids, number)

    with pytest.raises(KeyboardInterrupt):
        run(Interrupted(), journal=journal)
    assert "stopped after 6 of 11; the same command continues" in " ".join(capsys.readouterr().err.split())
    again = Scorer()
    assert lists(run(again, journal=journal)) == expected()
    assert again.met == [[6, 7, 8], [9, 10, 10]]


# Scores slowly, and writes down which batch it begins.
SLOW = """
import json, sys, time
from pathlib import Path
from tests.evaluation.test_runner import Scorer, lists, run

class Slow(Scorer):
    def __call__(self, ids, number):
        with open(sys.argv[2], "a") as log:
            log.write(f"{number[0]}\\n")
        time.sleep(float(sys.argv[3]))
        return super().__call__(ids, number)

print(json.dumps(lists(run(Slow(), journal=Path(sys.argv[1])))))
"""


@pytest.mark.slow
def test_killed_without_warning_nothing_is_lost_or_repeated(tmp_path):
    journal, log = tmp_path / "journal", tmp_path / "log"
    log.touch()

    def start(pause):
        arguments = [sys.executable, "-c", SLOW, str(journal), str(log), str(pause)]
        return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    killed = start(pause=1.0)
    while len(log.read_text().split()) < 3:
        assert killed.poll() is None
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    with open(journal, "ab") as file:
        file.write(b"\x50\x00\x00\x00torn")  # as if it had been in the middle of a record
    out, _ = start(pause=0.0).communicate()
    assert json.loads(out) == expected()
    assert log.read_text().split() == ["0", "3", "6", "6", "9"], "only the batch under way is scored again"


def tiny_sweep(n, journal=None):
    """A sweep of a tiny model on samples that are always the same."""
    config = tiny_config("kvc_w8s4", layers=1, vocabulary=VOCABULARY.size)
    return sweep(Transformer(config), draw_params(config), prompts_of(n), VOCABULARY, "test", journal)


@pytest.mark.slow
def test_eight_devices_give_the_numbers_of_one(tmp_path):
    n = 19  # 3 samples a device, the last ones filled up
    file, journal = tmp_path / "scores.npz", tmp_path / "journal"
    code = (
        "import sys, jax, numpy as np; from pathlib import Path; from tests.evaluation.test_runner import tiny_sweep;"
        f"assert jax.device_count() == 8; np.savez(sys.argv[1], **tiny_sweep({n}, Path(sys.argv[2])))"
    )
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    subprocess.run(
        [sys.executable, "-c", code, str(file), str(journal)],
        cwd=ROOT,
        check=True,
        env=os.environ | {"XLA_FLAGS": flags},
    )
    one = tiny_sweep(n)
    with np.load(file) as eight:
        assert set(eight) == set(one)
        for name, values in one.items():
            np.testing.assert_allclose(eight[name], values, rtol=1e-6, atol=1e-6, err_msg=name)
    # What eight devices wrote, one goes on from.
    for name, values in tiny_sweep(n, journal).items():
        with np.load(file) as eight:
            np.testing.assert_array_equal(values, eight[name])
