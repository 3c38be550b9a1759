"""Prompts of any tokenizer, read back token by token by a slow loop."""

import dataclasses
import itertools
import re

import numpy as np
import pytest

from phase_jax.data.lexicon import Lexicon, make_lexicon
from phase_jax.data.padding import PROTOCOLS, DistractorDependence
from phase_jax.data.tasks import Task
from phase_jax.data.tokenizers import assert_round_trip
from phase_jax.data.words import ANIMALS, NAMES
from phase_jax.errors import UserError
from tests.data.test_positions import deviations
from tests.data.test_tokenizers import SHIPPED, loaded

COLON, NEWLINE, BOS = 700, 701, 702
LINES = Lexicon(np.arange(0, 90), np.arange(100, 190), np.arange(200, 290), (COLON,), (NEWLINE,), BOS)
PAIRS = dataclasses.replace(LINES, after_key=(), after_value=(), bos=None)


def made(lexicon=LINES, protocol="prefix", **change):
    sizes = {"tokens": 400, "records": 40, "residues": 8, "samples": 12, "demonstrations": 3, "closing_filler": 5}
    return Task(lexicon, protocol, **{**sizes, "seed": 0, **change})


def read(task, tokens):
    """(records as (position, key, value), demonstrations, asked key) of one prompt, each token of it accounted for."""
    lexicon = task.lexicon
    keys, values, filler = (set(ids.tolist()) for ids in (lexicon.keys, lexicon.values, lexicon.filler))

    def record(t):
        key, *after_key = tokens[t : t + 1 + len(lexicon.after_key)]
        value, *after_value = tokens[t + 1 + len(lexicon.after_key) : t + lexicon.record_length]
        assert key in keys and value in values
        assert (tuple(after_key), tuple(after_value)) == (lexicon.after_key, lexicon.after_value)
        return t, key, value

    assert tokens[0] == lexicon.bos if lexicon.bos is not None else tokens[0] in filler
    ends = len(tokens) - 1 - len(lexicon.after_key)
    assert tuple(tokens[ends + 1 :]) == lexicon.after_key
    closing = ends - task.demonstrations * lexicon.record_length
    shown = [record(t)[1:] for t in range(closing, ends, lexicon.record_length)]
    records, t = [], 1
    while t < closing:
        if tokens[t] in filler:
            t += 1
        else:
            records.append(record(t))
            t += lexicon.record_length
    assert t == closing and closing - records[-1][0] - lexicon.record_length >= task.closing_filler
    return records, shown, tokens[ends]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("lexicon", [LINES, PAIRS])
@pytest.mark.parametrize("residues", [2, 8])
def test_every_prompt_says_what_is_stored_of_it(protocol, lexicon, residues):
    task = made(lexicon, protocol, residues=residues)
    ranks = set()
    for i, sample in enumerate(task):
        assert sample.tokens.shape == (residues, 400)
        replicas = []
        for r, tokens in enumerate(sample.tokens.tolist()):
            records, shown, asked = read(task, tokens)
            assert [t for t, _, _ in records] == sample.record_position[r].tolist()
            keys, values = [k for _, k, _ in records], [v for _, _, v in records]
            assert len(set(keys)) == len(set(values)) == 40, "drawn without replacement"
            rank = keys.index(asked)
            assert rank == task.placement.rank[i] and values[rank] == sample.answer
            assert records[rank][0] == task.placement.position[i, r]
            assert records[rank][0] % residues == r
            bindings = list(zip(keys, values, strict=True))
            assert len(set(shown)) == 3 and set(shown) <= set(bindings) - {bindings[rank]}
            replicas.append((bindings, shown, asked))
        assert all(replica == replicas[0] for replica in replicas)
        ranks.add(rank)
    assert len(ranks) > 3


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_64_record_task_of_a_real_tokenizer_decodes_to_its_records(name, protocol):
    """Every position of the prompts of SPEC §4 against the text of its token."""
    tokenizer = loaded(name)
    lexicon = _lexicon(name, "animals", "names")
    task = Task(lexicon, protocol, 256, 64, 24, 3, demonstrations=8, closing_filler=0, seed=1)
    text_of = {i: tokenizer.decode([i]) for sample in task for i in np.unique(sample.tokens).tolist()}
    for i, sample in enumerate(task):
        for r, tokens in enumerate(sample.tokens.tolist()):
            words = [text_of[token] for token in tokens]
            assert words[0] == "<｜begin▁of▁sentence｜>" if name == "deepseek" else words[0][1:].isalpha()
            at = [t for t in range(239) if words[t][1:] in ANIMALS]
            assert at == sample.record_position[r].tolist() and len(at) == len({words[t] for t in at}) == 64
            assert all(words[t + 1][1:] in NAMES for t in at)
            target = next(t for t in at if words[t] == words[-1])
            assert target == task.placement.position[i, r] and target % 24 == r
            assert tokenizer.decode([sample.answer]) == words[target + 1]
            listed = {words[t] + words[t + 1] for t in at if t != target}
            assert {words[t] + words[t + 1] for t in range(239, 255, 2)} <= listed
            assert_round_trip(tokenizer, tokens[at[0] : at[0] + 2])
        if protocol == "prefix":
            assert_round_trip(tokenizer, sample.tokens[0, at[0] : at[-1] + 2])


def _lexicon(name, keys, values, **form):
    tokenizer = loaded(name)
    return make_lexicon(tokenizer, keys, values, bos=tokenizer.bos, seed=1, **form)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_needle_prompt_of_a_real_tokenizer_is_text_of_its_records(name):
    tokenizer = loaded(name)
    lexicon = _lexicon(name, "words", "words", after_key=":", after_value="\n")
    assert min(len(lexicon.keys), len(lexicon.values)) >= 16_000
    pools = [set(ids.tolist()) for ids in (lexicon.keys, lexicon.values, lexicon.filler)]
    assert not any(a & b for a, b in itertools.combinations(pools, 2))
    task = Task(lexicon, "prefix", 1024, 200, 8, 1, demonstrations=0, closing_filler=16, seed=1)
    sample = task.sample(0)
    for r, tokens in enumerate(sample.tokens):
        first = sample.record_position[r, 0]
        block = tokens[first : first + 4 * 200]
        assert_round_trip(tokenizer, block)
        lines = tokenizer.decode(block).splitlines()
        assert len(lines) == 200
        asked = tokenizer.decode(tokens[-2:])
        (line,) = (line for line in lines if line.startswith(asked))
        assert line == asked + tokenizer.decode([sample.answer])


@pytest.mark.parametrize("n", [256, 2560])
def test_the_needle_test_of_the_paper_matches_positions(n):
    """128,000 tokens, 16,000 records, 8 residues: only the positions, which cost nothing."""
    big = dataclasses.replace(LINES, keys=np.arange(16_000), values=np.arange(16_000) + 20_000)
    task = Task(big, "prefix", 128_000, 16_000, 8, n, demonstrations=0, closing_filler=128, seed=0)
    mean, variance = deviations(task.placement.position, 8)
    assert mean <= 8 / n and variance <= 0.01
    assert abs(task.placement.position.mean() - 64_000) < 200


def test_prefix_padding_moves_all_records_together():
    for sample in made(samples=4):
        first = sample.record_position[:, 0]
        assert (np.diff(sample.record_position, axis=1) == 4).all()
        assert np.ptp(first) == 7
        blocks = [tokens[t : t + 160] for tokens, t in zip(sample.tokens, first, strict=True)]
        assert all((block == blocks[0]).all() for block in blocks)


def test_target_padding_moves_nothing_but_the_target():
    task = made(protocol="target", samples=4)
    for i, sample in enumerate(task):
        others = np.delete(sample.record_position, task.placement.rank[i], axis=1)
        assert (others == others[0]).all()
        slot = task.placement.position[i].min()
        assert (
            np.delete(sample.tokens, range(slot, slot + 11), axis=1) == sample.tokens[0, np.r_[:slot, slot + 11 : 400]]
        ).all()


def test_insequence_padding_draws_the_gaps_anew_in_every_replica():
    for sample in made(protocol="insequence", samples=4):
        gaps = np.diff(sample.record_position, axis=1) - 4
        assert gaps.min() == 0 and gaps.max() > 3
        assert len({tuple(row) for row in gaps.tolist()}) == 8


def test_streams_of_keys_values_and_filler_are_disjoint():
    base = made(samples=2)
    records = [read(base, sample.tokens[0].tolist())[0] for sample in base]

    def parts(task):
        found = [read(task, sample.tokens[0].tolist())[0] for sample in task]
        return [[k for _, k, _ in r] for r in found], [[v for _, _, v in r] for r in found]

    keys, values = parts(base)
    assert records[0] != records[1]
    assert parts(made(samples=2, protocol="insequence")) == (keys, values), "gaps draw from a stream of their own"
    other_values = made(dataclasses.replace(LINES, values=LINES.values[:50]), samples=2)
    assert parts(other_values)[0] == keys and parts(other_values)[1] != values
    other_filler = made(dataclasses.replace(LINES, filler=LINES.filler[:5]), samples=2)
    assert parts(other_filler) == (keys, values)
    assert parts(made(samples=2, seed=1))[0] != keys


def test_a_sample_is_a_function_of_the_seed_and_its_index():
    for again, sample in zip(made(), made(), strict=True):
        np.testing.assert_array_equal(again.tokens, sample.tokens)
    np.testing.assert_array_equal(made().sample(7).tokens, list(made())[7].tokens)
    assert (made(seed=1).sample(0).tokens != made().sample(0).tokens).any()


def test_distractors_move_with_the_target_only_under_prefix_padding():
    lockstep = {}
    for protocol in PROTOCOLS:
        task, dependence = made(protocol=protocol), DistractorDependence(8)
        for i, sample in enumerate(task):
            dependence.add(sample.record_position[None], task.placement.rank[i, None])
        checks = task.checks(dependence)
        assert checks["matched"] is False, "12 samples are too few for 1 %"
        lockstep[protocol] = checks["distractors"]["lockstep"]
    assert lockstep["prefix"] == pytest.approx(1) and lockstep["target"] == pytest.approx(0, abs=1e-12)
    assert lockstep["insequence"] < 0.3


def test_the_least_length_that_is_named_is_enough():
    with pytest.raises(
        UserError, match=r"--tokens 90: 40 records of 4 tokens on 8 residues .* need (\d+) or more"
    ) as e:
        made(tokens=90)
    least = int(re.search(r"need (\d+)", str(e.value))[1])
    with pytest.raises(UserError):
        made(tokens=least - 1)
    for sample in made(tokens=least, protocol="insequence"):
        assert sample.tokens.shape == (8, least)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"records": 91, "tokens": 900}, "--records 91: keys are drawn without replacement, and the tokenizer has 90"),
        ({"records": 0}, "--records 0: it must be 1 or more"),
        ({"samples": 0}, "--samples 0"),
        ({"residues": 1}, "--residues 1: it must be 2 or more"),
        ({"closing_filler": -1}, "--closing-filler -1: it must be 0 or more"),
        ({"seed": -1}, "--seed -1"),
        ({"demonstrations": 40}, "--demonstrations 40: choose from 0 to 39"),
        ({"protocol": "suffix"}, "unknown protocol 'suffix'"),
    ],
)
def test_impossible_tasks_are_refused_with_the_setting(change, message):
    with pytest.raises(UserError, match=message):
        made(**change)


@pytest.mark.parametrize("name", SHIPPED[:1])
def test_too_few_numbers_and_words_of_two_tokens_are_refused(name, tmp_path):
    few = _lexicon(name, "numeric", "words", after_key=":", after_value="\n")
    with pytest.raises(UserError, match=r"--records 16000: keys are drawn .* has 10 for them; choose .* --keys"):
        Task(few, "prefix", 128_000, 16_000, 8, 1, demonstrations=0, closing_filler=0, seed=0)
    words = tmp_path / "words.txt"
    words.write_text("fox\ngiraffe\n")
    with pytest.raises(UserError, match=r"' giraffe' is 2 tokens of tokenizer 'qwen'"):
        _lexicon(name, str(words), "names")
    words.write_text("fox\nowl\nfox\n")
    with pytest.raises(UserError, match=r"has the word 'fox' twice"):
        _lexicon(name, str(words), "names")
    with pytest.raises(UserError, match="--keys animals and --values animals have words in common"):
        _lexicon(name, "animals", "animals")
    with pytest.raises(UserError, match="is no list of words"):
        _lexicon(name, str(tmp_path / "nothing"), "names")
    words.write_text("fox\nowl\n")
    own = _lexicon(name, str(words), "words")
    assert [loaded(name).decode([i]) for i in own.keys] == [" fox", " owl"]
    assert not set(own.keys.tolist()) & {*own.values.tolist(), *own.filler.tolist()}


def test_bytes_have_no_words_for_filler():
    with pytest.raises(UserError, match="tokenizer 'bytes' has no words of one token"):
        make_lexicon(loaded("bytes"), "numeric", "words", bos=None, seed=0)
