"""Corpora: every token of every document once, in an order that is a function of the seed; damage is named."""

import json
import random
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from experiments import cli
from phase_jax.data.corpus import SPLITS, Corpus, TextConfig, shuffled, write_corpus
from phase_jax.data.tokenizers import ByteTokenizer
from phase_jax.errors import UserError

BYTES = ByteTokenizer()
RECORD = 32


def some_documents(n=200):
    rng = random.Random(0)
    return ["".join(rng.choices("abc déf\n", k=rng.randrange(0, 90))) + str(i) for i in range(n)]


def write(folder, documents, **options):
    settings = {"source": "a test", "record_tokens": RECORD, "held_out": 0.2, "shard_tokens": 64 * RECORD, **options}
    return write_corpus(documents, BYTES, folder, **settings)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "made"
    write(folder, some_documents())
    return folder


def stream(corpus, split, length=RECORD):
    """All tokens of a split: those of its sequences and the one that follows the last."""
    batch = corpus.read(split, length, np.arange(corpus.sequences(split, length)))
    np.testing.assert_array_equal(batch.tokens[1:, 0], batch.targets[:-1, -1])
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert batch.counted.all() and batch.tokens.dtype == np.int32
    return [*batch.tokens.ravel().tolist(), int(batch.targets[-1, -1])]


def texts(corpus, split):
    """The whole documents of a split, and the beginning of one that was dropped."""
    ids = stream(corpus, split)
    parts = bytes(0 if i == BYTES.end_of_text else i for i in ids).split(b"\0")
    return [part.decode() for part in parts[:-1]], parts[-1]


@pytest.mark.parametrize("length", [RECORD, 8])
def test_the_records_are_the_documents_one_after_the_other_with_end_of_text_between(corpus, length):
    made = Corpus(corpus)
    assert stream(made, "train", length) == stream(made, "train")
    train, held_out = texts(made, "train")[0], texts(made, "held_out")[0]
    documents = some_documents()
    assert train == [d for d in documents if d in set(train)], "in their order"
    assert not set(train) & set(held_out)
    about = made.about["splits"]
    assert about["train"]["documents"] + about["held_out"]["documents"] == len(documents)
    assert sum(s["tokens"] for s in about.values()) == sum(len(d.encode()) + 1 for d in documents)
    for split in SPLITS:
        assert about[split]["tokens"] == RECORD * about[split]["records"] + about[split]["dropped_tokens"] + 1
    # What no record holds is the end of the last document, or of a few.
    assert len(train) + len(held_out) >= len(documents) - 2 * (RECORD + 1)
    assert len(list(corpus.glob("train-*"))) == -(-about["train"]["records"] // 64) > 1
    assert 0.1 < about["held_out"]["documents"] / len(documents) < 0.3


def test_what_is_held_out_depends_on_the_text_alone(corpus, tmp_path):
    documents = some_documents()
    write(tmp_path / "again", documents[::-1] + documents)
    again, made = Corpus(tmp_path / "again"), Corpus(corpus)
    assert not set(texts(again, "train")[0]) & set(texts(made, "held_out")[0])
    assert not set(texts(again, "held_out")[0]) & set(texts(made, "train")[0])


def test_the_same_documents_make_the_same_corpus(corpus, tmp_path):
    write(tmp_path / "again", iter(some_documents()))
    assert Corpus(tmp_path / "again").hash == Corpus(corpus).hash


def test_every_epoch_is_another_permutation_and_a_function_of_the_seed():
    order = shuffled(40, 8, seed=3)
    epochs = [np.concatenate([order[step] for step in range(5 * e, 5 * e + 5)]) for e in range(3)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    np.testing.assert_array_equal(order[7], shuffled(40, 8, seed=3)[7])
    # Grain counts the epoch onto the seed: the next seed must not begin with this one's second epoch.
    assert not np.array_equal(epochs[1], np.concatenate([shuffled(40, 8, seed=4)[step] for step in range(5)]))


@pytest.mark.parametrize(
    ("config", "vocabulary", "said"),
    [
        ({"tokenizer": "other"}, 258, "is of tokenizer 'bytes', the run's data.tokenizer is 'other'"),
        ({}, 257, "model.vocabulary 257 is smaller than tokenizer 'bytes': 258"),
        ({"length": 12}, 258, "data.length 12 does not divide the 32 tokens of a record"),
    ],
)
def test_a_run_that_does_not_fit_the_corpus_is_refused(corpus, monkeypatch, config, vocabulary, said):
    other = type("Other", (ByteTokenizer,), {"hash": "another"})
    monkeypatch.setattr("phase_jax.data.corpus.load_tokenizer", lambda n: BYTES if n == "bytes" else other())
    with pytest.raises(UserError, match=said):
        Corpus(corpus).check(TextConfig(**{"corpus": str(corpus), "length": 8, **config}), vocabulary)


def damage(folder, how):
    shard = folder / "train-00001.array_record"
    content = shard.read_bytes()
    {
        "gone": shard.unlink,
        "torn": lambda: shard.write_bytes(content[: len(content) // 2]),
        "empty": lambda: shard.write_bytes(b""),
        "described": lambda: (folder / "corpus.json").write_text("{}"),
    }[how]()


@pytest.mark.parametrize("how", ["gone", "torn", "empty", "described"])
def test_a_torn_corpus_is_refused(corpus, tmp_path, how):
    copy = Path(shutil.copytree(corpus, tmp_path / "copy"))
    damage(copy, how)
    with pytest.raises(UserError, match="make it again") as error:
        stream(Corpus(copy), "train")
    assert "\n" not in str(error.value)


def test_altered_bytes_are_never_read(corpus, tmp_path):
    rng, whole, refused = np.random.default_rng(0), stream(Corpus(corpus), "train"), 0
    for i in range(8):
        copy = Path(shutil.copytree(corpus, tmp_path / str(i)))
        shard = copy / "train-00001.array_record"
        content = bytearray(shard.read_bytes())
        content[rng.choice(np.flatnonzero(np.frombuffer(content, np.uint8)))] ^= 1 << rng.integers(8)  # not the padding
        shard.write_bytes(content)
        try:
            assert stream(Corpus(copy), "train") == whole
        except UserError:
            refused += 1
    assert refused


def test_a_full_disk_leaves_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(UserError, match="could not be written"):
            write(tmp_path / "corpus", (str(random.random()) * 50 for _ in range(3000)), shard_tokens=2**26)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_ctrl_c_leaves_nothing_and_exits_130(tmp_path, monkeypatch):
    def interrupted(*args):
        yield from some_documents()
        raise KeyboardInterrupt

    monkeypatch.setattr("phase_jax.data.documents.python_documentation", interrupted)
    assert cli.main(["corpus", "--out", str(tmp_path / "corpus")]) == 130
    assert not list(tmp_path.iterdir())


def test_the_command_makes_a_corpus_of_a_folder_and_says_what_is_in_it(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    for i, document in enumerate(some_documents()):
        (tmp_path / "texts" / f"{i:03}.txt").write_text(document)
    command = ["corpus", "--folder", str(tmp_path / "texts"), "--out", str(tmp_path / "made"), "--held-out", "0.2"]
    assert cli.main([*command, "--record-tokens", str(RECORD)]) == 0
    about = json.loads((tmp_path / "made" / "corpus.json").read_text())
    assert f"train: {about['splits']['train']['documents']} documents" in capsys.readouterr().out
    assert cli.main(command) == 2
    assert "made exists: choose another --out or remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--record-tokens", "1000000"], "too few for a record of 1000000"),
        (["--held-out", "0"], "--held-out 0.0 must lie between 0 and 1"),
        (["--tokenizer", "nothing"], "tokenizer 'nothing': choose"),
        (["--folder", "nowhere"], "nowhere is not a folder"),
        (["--folder", "x", "--tfds", "y"], "not allowed with argument"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path, capsys, arguments, said):
    assert cli.main(["corpus", "--out", str(tmp_path / "corpus"), *arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("phase-jax: ")]
    assert len(lines) == 1 and said in lines[0]
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_without_end_of_text_cannot_pack(tmp_path):
    endless = type("Endless", (ByteTokenizer,), {"end_of_text": None})()
    with pytest.raises(UserError, match="has no end-of-text token"):
        write_corpus(["a"], endless, tmp_path / "corpus", source="a test")
