"""Training batches of the recall task, read back token by token by a slow loop."""

import dataclasses
import itertools
from collections import Counter

import jax
import numpy as np
import pytest

from phase_jax.data.recall import RecallConfig, batch_for_step, recall_batch
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.errors import UserError

VOCABULARY = Vocabulary(9)
CONFIG = RecallConfig(
    words=9, records=5, length=80, demonstrations=2, queries=6, curriculum=((0.375, 3, 24), (1.0, 5, 32))
)


def drawn(gap_share, key=0, batch=64):
    return recall_batch(
        jax.random.key(key),
        vocabulary=VOCABULARY,
        batch=batch,
        records=5,
        length=32,
        queries=6,
        gap_share=gap_share,
    )


def decode(tokens):
    """(records as {animal: (position, name)}, query pairs as [(position, animal, name)]) of one sequence."""
    assert tokens[0] == VOCABULARY.bos
    records, queries, pairs = {}, [], None
    t = 1
    while t < len(tokens):
        if tokens[t] == VOCABULARY.filler and pairs is None:
            t += 1
        elif tokens[t] == VOCABULARY.query_mark and pairs is None:
            pairs, t = queries, t + 1
        else:
            animal, name = tokens[t], tokens[t + 1]
            assert 3 <= animal < 12 and 12 <= name < 21, f"no pair at {t}"
            if pairs is None:
                assert animal not in records, "an animal is recorded once"
                records[animal] = (t, name)
            else:
                pairs.append((t, animal, name))
            t += 2
    return records, queries


def test_queries_ask_recorded_animals_and_the_answer_is_the_recorded_name():
    batch = drawn(0.5)
    asked_at = batch.asked_at.tolist()
    assert batch.tokens.shape == (64, 32)
    for tokens, answers in zip(np.asarray(batch.tokens).tolist(), np.asarray(batch.answer).tolist(), strict=True):
        records, queries = decode(tokens)
        assert len(records) == 5 and len({name for _, name in records.values()}) == 5
        assert [t for t, _, _ in queries] == asked_at and len(queries) == 6
        for (_, animal, name), answer in zip(queries, answers, strict=True):
            assert records[animal][1] == name == answer


@pytest.mark.parametrize(("gap_share", "least", "most"), [(0.0, 0, 0), (1.0, 60, 64), (0.5, 18, 46)])
def test_gap_share_is_the_share_of_sequences_with_filler_between_records(gap_share, least, most):
    with_gaps, first = 0, set()
    for tokens in np.asarray(drawn(gap_share).tokens).tolist():
        positions = [t for t, _ in decode(tokens)[0].values()]
        first.add(positions[0])
        with_gaps += any(b - a != 2 for a, b in itertools.pairwise(positions))
    assert least <= with_gaps <= most
    assert len(first) > 4, "the records begin anywhere"


def test_records_reach_every_position_before_the_query():
    reached = {t for tokens in np.asarray(drawn(0.5).tokens).tolist() for t, _ in decode(tokens)[0].values()}
    # The query mark is at 32 − 1 − 2·6 = 19, so that the last record may begin at 17.
    assert reached == set(range(1, 18))


def test_batches_are_a_function_of_the_key_and_the_step():
    def tokens(key, step):
        return np.asarray(batch_for_step(CONFIG, 64, step, 8, jax.random.key(key)).tokens)

    np.testing.assert_array_equal(tokens(0, 5), tokens(0, 5))
    assert (tokens(0, 5) != tokens(0, 6)).any(axis=1).all(), "every sequence is another one"
    assert (tokens(0, 5) != tokens(1, 5)).any(axis=1).all()
    expected = drawn(CONFIG.gap_share, key=0)
    assert (tokens(0, 5) != np.asarray(expected.tokens)).any(), "the step is folded into the key"


def test_stages_follow_their_shares_of_the_steps():
    sizes = [CONFIG.stage(step, 8)[1:3] for step in range(8)]
    assert sizes == [(3, 24)] * 3 + [(5, 32)] * 5
    assert batch_for_step(CONFIG, 64, 3, 8, jax.random.key(0)).tokens.shape == (64, 32)


def test_a_stage_may_have_queries_sequences_and_words_of_its_own():
    config = dataclasses.replace(CONFIG, curriculum=((0.5, 3, 24, 8, 16, 4), (1.0, 5, 32)))
    own, usual = (batch_for_step(config, 64, step, 8, jax.random.key(0)) for step in (0, 4))
    assert own.tokens.shape == (16, 24) and own.answer.shape == (16, 8)
    assert usual.tokens.shape == (64, 32) and usual.answer.shape == (64, 6)
    first = {*range(3, 7), *range(12, 16)}  # four animals, four names
    assert set(np.unique(own.tokens).tolist()) == first | {VOCABULARY.bos, VOCABULARY.query_mark}
    assert set(np.unique(usual.tokens).tolist()) == set(range(VOCABULARY.size))


def test_where_names_are_few_records_share_them():
    config = dataclasses.replace(CONFIG, names=3)
    vocabulary = config.vocabulary
    assert vocabulary.size == 3 + 9 + 3
    tokens = np.asarray(batch_for_step(config, 64, 4, 8, jax.random.key(0)).tokens)
    for row in tokens.tolist():
        records = {a: b for a, b in itertools.pairwise(row[: 32 - 13]) if 3 <= a < 12}
        assert len(records) == 5 and max(Counter(records.values()).values()) <= 3, "nine words, three to a name"
        queries = row[32 - 12 :]
        assert all(records[a] == b for a, b in zip(queries[::2], queries[1::2], strict=True))
    assert set(np.unique(tokens).tolist()) == set(range(15))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": 0}, "data.names 0: at least one word"),
        ({"curriculum": ((0.5, 5, 32),)}, "must end with a stage whose share of the steps is 1.0"),
        ({"curriculum": ()}, "must end with a stage"),
        ({"curriculum": ((1.0, 10, 60),)}, "10 records need as many single-token words of a kind; data.words is 9"),
        ({"records": 10}, "10 records need as many"),
        ({"curriculum": ((1.0, 5, 23),)}, "length 23 is too short for 5 records and 6 queries: it needs 24"),
        ({"length": 77}, "prompt length 77 is too short for 5 records and 2 demonstrations.*it needs 78 or more"),
        ({"closing_filler": 3}, "prompt length 80 is too short .* it needs 81 or more"),
        ({"closing_filler": -1}, "closing filler -1: it must be 0 or more"),
        ({"demonstrations": 5}, "5 demonstrations: choose from 0 to 4"),
        ({"words": 0}, "data.words 0"),
        ({"curriculum": ((0.5, 5, 32, 6, 8, 4), (1.0, 5, 32))}, "5 records need as many single-token words"),
        ({"curriculum": ((0.5, 5, 32, 11), (1.0, 5, 32))}, "length 32 is too short for 5 records and 11 queries"),
    ],
)
def test_impossible_tasks_are_refused(change, message):
    sizes = {"words": 9, "records": 5, "length": 80, "demonstrations": 2, "queries": 6}
    values = {**sizes, "curriculum": ((1.0, 5, 32),), **change}
    with pytest.raises(UserError, match=message):
        RecallConfig(**values)


def test_the_shortest_length_that_is_allowed_is_filled():
    config = RecallConfig(words=9, records=5, length=80, demonstrations=2, queries=6, curriculum=((1.0, 5, 24),))
    assert CONFIG.vocabulary.filler not in np.asarray(batch_for_step(config, 64, 0, 1, jax.random.key(0)).tokens)
