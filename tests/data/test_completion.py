"""Completion prompts read back from their ids."""

import numpy as np
import pytest

from phase_jax.data.completion import EXAMPLE, EXAMPLE_RIGHT, EXAMPLE_WRONG, FILLERS, LENGTHS, SLOT, completion_prompts
from phase_jax.data.tokenizers import ByteTokenizer, load_tokenizer
from phase_jax.errors import UserError

BYTES = ByteTokenizer()


@pytest.fixture(scope="module", params=["bytes", "qwen", "deepseek"])
def tokenizer(request):
    try:
        return load_tokenizer(request.param)
    except UserError as missing:
        pytest.skip(str(missing))


def test_only_the_filler_grows_by_exactly_one_token(tokenizer):
    prompts = completion_prompts(tokenizer, EXAMPLE, EXAMPLE_RIGHT, EXAMPLE_WRONG)
    before, behind = map(tokenizer.encode, EXAMPLE.split(SLOT))
    continuations = [tokenizer.encode(text) for text in (EXAMPLE_RIGHT, EXAMPLE_WRONG)]
    assert prompts.fillers == tuple(FILLERS) and prompts.lengths.tolist() == list(LENGTHS) == list(range(24, 40))
    assert prompts.count.tolist() == [len(ids) for ids in continuations]
    assert prompts.tokens.shape[:2] == (64, 2)
    rows = iter(zip(prompts.tokens.tolist(), prompts.start.tolist(), strict=True))
    for name in FILLERS:
        last = []
        for length in LENGTHS:
            sides, start = next(rows)
            for ids, continuation in zip(sides, continuations, strict=True):
                filler = ids[len(before) : len(before) + length]
                assert ids[: len(before)] == before
                assert ids[len(before) + length : start] == behind
                assert ids[start : start + len(continuation)] == continuation
                assert set(ids[start + len(continuation) :]) <= {continuation[-1]}
                assert set(tokenizer.decode(filler)) <= set(FILLERS[name]) and len(tokenizer.decode(filler)) == length
            assert filler[1:] == last or not last, "a longer filler ends in the shorter one"
            last = filler
        assert len(set(last)) == 1 or name == "mixed"


def test_continuations_of_several_tokens_and_a_first_token():
    prompts = completion_prompts(BYTES, f"{SLOT}x", "right", "no", lengths=range(1, 3), fillers=["dots"], first=256)
    assert prompts.tokens.tolist() == [
        [[256, *b".xright"] + [ord("t")], [256, *b".xno"] + [ord("o")] * 4],
        [[256, *b"..xright"], [256, *b"..xno"] + [ord("o")] * 3],
    ]
    assert prompts.start.tolist() == [3, 4] and prompts.count.tolist() == [5, 2]


@pytest.mark.parametrize(
    ("template", "right", "wrong", "fillers", "said"),
    [
        ("no slot", "a", "b", ["dots"], "the template has 0 slots: write {filler} in it once"),
        (f"{SLOT} and {SLOT}", "a", "b", ["dots"], "the template has 2 slots"),
        (f"code {SLOT}", "a", "b", ["dots"], "the template ends with {filler}"),
        (f"{SLOT}x", "", "b", ["dots"], "the right continuation is empty"),
        (f"{SLOT}x", "a", "", ["dots"], "the wrong continuation is empty"),
        (f"{SLOT}x", "8", "8", ["dots"], "the right continuation '8' begins the other one"),
        (f"{SLOT}x", "64", "6", ["dots"], "the wrong continuation '6' begins the other one"),
        (f"{SLOT}x", "a", "b", ["dot"], "unknown filler 'dot'; did you mean 'dots'?"),
    ],
)
def test_bad_input_is_refused_in_one_line(template, right, wrong, fillers, said):
    with pytest.raises(UserError) as raised:
        completion_prompts(BYTES, template, right, wrong, fillers=fillers)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_prompts_are_a_function_of_their_arguments():
    first, second = (completion_prompts(BYTES, EXAMPLE, "64", "16") for _ in range(2))
    np.testing.assert_array_equal(first.tokens, second.tokens)
