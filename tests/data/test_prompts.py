"""Phase prompts, read back token by token by a slow loop."""

import functools
import itertools
import math
from collections import Counter

import numpy as np
import pytest
import scipy.stats

from configs import lab
from configs.family import FAMILY, model_config
from phase_jax.data.padding import PROTOCOLS, DistractorDependence, _spread
from phase_jax.data.prompts import phase_prompts
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.errors import UserError

VOCABULARY = Vocabulary(20)
SIZES = {"length": 104, "records": 16, "demonstrations": 8}


@functools.cache
def made(protocol, n=12, seed=0):
    return phase_prompts(VOCABULARY, protocol, n, **SIZES, seed=seed)


def is_animal(token):
    return VOCABULARY.first_animal <= token < VOCABULARY.first_name


def is_name(token):
    return VOCABULARY.first_name <= token < VOCABULARY.size


def decode(tokens):
    """(records as (position, animal, name), position of the query mark, demonstrations, asked animal) of one prompt."""
    assert tokens[0] == VOCABULARY.bos
    records, t = [], 1
    while tokens[t] != VOCABULARY.query_mark:
        if tokens[t] == VOCABULARY.filler:
            t += 1
            continue
        assert is_animal(tokens[t]) and is_name(tokens[t + 1]), f"no record at {t}"
        records.append((t, tokens[t], tokens[t + 1]))
        t += 2
    mark, shown = t, []
    for t in range(mark + 1, len(tokens) - 1, 2):
        assert is_animal(tokens[t]) and is_name(tokens[t + 1]), f"no demonstration at {t}"
        shown.append((tokens[t], tokens[t + 1]))
    assert is_animal(tokens[-1])
    return records, mark, shown, tokens[-1]


def assert_prompt_is_right(prompts, i, r, demonstrations):
    """One prompt against what is said of it; returns what must be the same in all replicas."""
    records, mark, shown, asked = decode(prompts.tokens[i, r].tolist())
    assert [position for position, _, _ in records] == prompts.record_position[i, r].tolist()
    animals, names = [a for _, a, _ in records], [b for _, _, b in records]
    assert len(set(animals)) == len(set(names)) == len(records)
    rank = animals.index(asked)
    assert rank == prompts.rank[i] and names[rank] == prompts.answer[i]
    assert records[rank][0] == prompts.target_position[i, r]
    assert records[rank][0] % prompts.tokens.shape[1] == r
    bindings = list(zip(animals, names, strict=True))
    assert len(shown) == len(set(shown)) == demonstrations
    assert set(shown) <= set(bindings) - {bindings[rank]}, "demonstrations are records, and never the target"
    return bindings, mark, shown, asked


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_prompt_says_what_is_stored_of_it(protocol):
    prompts = made(protocol)
    assert prompts.tokens.shape == (12, 24, 104)
    marks = set()
    for i in range(12):
        replicas = [assert_prompt_is_right(prompts, i, r, 8) for r in range(24)]
        assert all(replica == replicas[0] for replica in replicas), "one choice of bindings in all replicas"
        marks.add(replicas[0][1])
    assert marks == {104 - 18}, "one query position in the whole run: 8 demonstrations, a mark, an animal"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("demonstrations", [0, 15])
def test_as_few_and_as_many_demonstrations_as_there_can_be(protocol, demonstrations):
    sizes = {**SIZES, "demonstrations": demonstrations}
    prompts = phase_prompts(VOCABULARY, protocol, 3, **sizes, seed=0)
    for i, r in itertools.product(range(3), range(24)):
        assert_prompt_is_right(prompts, i, r, demonstrations)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_so_much_filler_follows_the_last_record_in_every_replica(protocol):
    prompts = phase_prompts(VOCABULARY, protocol, 60, **SIZES, closing_filler=9, seed=0)
    last_record_ends = prompts.record_position.max(axis=2) + 1
    between = 104 - 18 - 1 - last_record_ends  # to the query mark
    assert between.min() >= 9 and (between.min() == 9 or protocol != "insequence")
    for i, r in itertools.product(range(60), range(24)):
        assert_prompt_is_right(prompts, i, r, 8)
        assert (prompts.tokens[i, r, last_record_ends[i, r] + 1 : 104 - 18] == VOCABULARY.filler).all()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_other_residues_than_24(protocol):
    prompts = phase_prompts(VOCABULARY, protocol, 4, **SIZES, seed=0, residues=8)
    assert prompts.tokens.shape == (4, 8, 104)
    for i, r in itertools.product(range(4), range(8)):
        assert_prompt_is_right(prompts, i, r, 8)


def test_samples_differ_in_bindings_order_and_target():
    prompts = made("prefix")
    decoded = [decode(prompts.tokens[i, 0].tolist()) for i in range(12)]
    assert len({tuple((a, b) for _, a, b in records) for records, *_ in decoded}) == 12
    assert len({tuple(shown) for _, _, shown, _ in decoded}) == 12
    assert len(set(prompts.rank.tolist())) > 3


def test_prefix_padding_moves_all_records_together():
    prompts = made("prefix")
    for sample, target in zip(prompts.record_position, prompts.target_position, strict=True):
        offsets = {tuple(row - moved) for row, moved in zip(sample, target, strict=True)}
        assert len(offsets) == 1
        assert set(np.diff(offsets.pop())) == {2}, "the records are adjacent"


def test_target_padding_moves_nothing_but_the_target():
    prompts = made("target")
    for i in range(12):
        others = []
        for r in range(24):
            row = prompts.tokens[i, r].tolist()
            at = row.index(row[-1])
            row[at : at + 2] = [VOCABULARY.filler] * 2
            others.append(row)
        assert all(row == others[0] for row in others)
        assert np.ptp(prompts.target_position[i]) == 23


def test_insequence_padding_draws_the_gaps_anew_in_every_replica():
    prompts = made("insequence", n=200)
    gaps = np.diff(prompts.record_position, axis=2) - 2
    assert gaps.min() == 0 and gaps.max() > 8
    for sample in gaps:
        assert len({tuple(row) for row in sample}) > 20, "replicas share their gaps"
    # As much filler between records after the target as before it, since every gap is one of many alike.
    before = np.concatenate([g[:, :k].ravel() for g, k in zip(gaps, prompts.rank, strict=True)])
    after = np.concatenate([g[:, k:].ravel() for g, k in zip(gaps, prompts.rank, strict=True)])
    assert abs(before.mean() / after.mean() - 1) < 0.2


def test_every_way_to_spread_filler_is_equally_likely():
    starts = _spread(np.random.default_rng(0), np.full(6000, 2), np.full(6000, 2), 3, 2)
    ways = Counter(map(tuple, starts[:, :2].tolist()))
    # Two records of two tokens among two fillers: units 0 … 3, the later record shifted by the earlier one's length.
    expected = {(a, b + 1) for a, b in itertools.combinations(range(4), 2)}
    assert set(ways) == expected
    assert scipy.stats.chisquare(list(ways.values())).pvalue > 1e-4


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_record_is_within_reach_of_the_exact_window_of_any_lab_model(protocol):
    data = lab.get_config("kvc_w8s8_1kv_baseline").data
    widest = max(model_config(variant).exact_width for variant in FAMILY)
    prompts = phase_prompts(
        Vocabulary(data.words),
        protocol,
        48,
        length=data.length,
        records=data.records,
        demonstrations=data.demonstrations,
        seed=0,
    )
    last_record_ends = prompts.record_position.max(axis=(1, 2)) + 1
    assert (data.length - 2 - last_record_ends > widest).all(), "closing filler and demonstrations exceed the window"
    assert prompts.checks["mean_deviation"] == 0, "24 divides 48"


def slow_cramers_v(position, rank):
    """From a table of (target residue, distractor residue) filled one pair at a time."""
    n, residues, records = position.shape
    table = np.zeros((residues, residues))
    for i, r, k in itertools.product(range(n), range(residues), range(records)):
        if k != rank[i]:
            table[r, position[i, r, k] % residues] += 1
    table = table[:, table.sum(axis=0) > 0]
    chi2 = scipy.stats.chi2_contingency(table, correction=False).statistic
    return math.sqrt(chi2 / (table.sum() * (min(table.shape) - 1)))


def slow_lockstep(position, rank):
    n, residues, records = position.shape
    turns = []
    for i, k in itertools.product(range(n), range(records)):
        if k != rank[i]:
            angles = [2 * math.pi * (position[i, r, k] - r) / residues for r in range(residues)]
            mean = sum(complex(math.cos(a), math.sin(a)) for a in angles) / residues
            turns.append(abs(mean) ** 2)
    return sum(turns) / len(turns)


@pytest.mark.parametrize("residues", [3, 8])
def test_dependence_equals_the_slow_loops(residues):
    rng = np.random.default_rng(0)
    position = rng.integers(0, 50, (7, residues, 4))
    position[:, :, 1] = position[:, :1, 1] + np.arange(residues)  # one distractor moves with the target
    rank = rng.choice([0, 2, 3], 7)
    dependence = DistractorDependence(residues)
    dependence.add(position[:3], rank[:3])
    dependence.add(position[3:], rank[3:])
    found = dependence.report()
    assert found["cramers_v"] == pytest.approx(slow_cramers_v(position, rank))
    assert found["lockstep"] == pytest.approx(slow_lockstep(position, rank))


def test_a_single_record_has_no_distractors():
    dependence = DistractorDependence(8)
    dependence.add(np.zeros((3, 8, 1), int), np.zeros(3, int))
    assert dependence.report() == {"cramers_v": None, "lockstep": None}


def test_distractors_move_with_the_target_only_under_prefix_padding():
    lockstep = {protocol: made(protocol).checks["distractors"]["lockstep"] for protocol in PROTOCOLS}
    assert lockstep["prefix"] == pytest.approx(1)
    assert lockstep["target"] == pytest.approx(0, abs=1e-12)
    assert lockstep["insequence"] < 0.25
    prompts = made("insequence")
    assert lockstep["insequence"] == pytest.approx(slow_lockstep(prompts.record_position, prompts.rank))


def test_distractor_residues_do_not_tell_the_targets_under_insequence_padding():
    assert made("insequence", n=1000).checks["distractors"]["cramers_v"] < 0.04


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_prompts_are_a_function_of_the_seed(protocol):
    again = phase_prompts(VOCABULARY, protocol, 12, **SIZES, seed=0)
    np.testing.assert_array_equal(again.tokens, made(protocol).tokens)
    assert (made(protocol, seed=1).tokens != again.tokens).any(axis=(1, 2)).all(), "every sample is another one"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "--logical 0: at least one logical sample"),
        ({"demonstrations": 16}, "16 demonstrations: choose from 0 to 15"),
        ({"demonstrations": -1}, "choose from 0 to 15"),
        ({"length": 60}, r"prompt length 60 is too short .* needs 90 or more"),
        ({"length": 10}, "prompt length 10 is too short"),
        ({"records": 21}, "21 records need as many single-token words of a kind; data.words is 20"),
        ({"protocol": "suffix"}, "unknown protocol 'suffix'; choose prefix, insequence, target"),
    ],
)
def test_impossible_prompts_are_refused_with_the_remedy(change, message):
    with pytest.raises(UserError, match=message):
        phase_prompts(VOCABULARY, **{"protocol": "prefix", "n": 3, **SIZES, "seed": 0, **change})


def test_records_share_the_names_where_there_are_fewer():
    vocabulary = Vocabulary(20, names=4)
    prompts = phase_prompts(vocabulary, "prefix", 3, **SIZES, seed=0)
    assert prompts.tokens.max() == vocabulary.size - 1 == 26
    names = np.take_along_axis(prompts.tokens, prompts.record_position + 1, axis=2)
    assert set(np.unique(names)) == set(range(23, 27))
    assert (np.take_along_axis(names, prompts.rank[:, None, None], axis=2)[..., 0] == prompts.answer[:, None]).all()


@pytest.mark.parametrize("words", [64, 1024])
def test_words_are_distinct_single_tokens(words):
    vocabulary = Vocabulary(words)
    said = vocabulary.text(range(vocabulary.size)).split()
    assert vocabulary.size == len(said) == len(set(said)) == 2 * words + 3
