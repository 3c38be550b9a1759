"""Documents of folders and of TFDS builders, and what is said of files that are not what their name says."""

import gzip
import json
import sys

import numpy as np
import pytest

from phase_jax.data.documents import folder_documents, python_documentation, tfds_documents
from phase_jax.errors import UserError


def test_a_folder_gives_the_documents_of_every_kind_of_file_in_the_order_of_names(tmp_path):
    (tmp_path / "b.txt").write_text("ä text\nof two lines")
    (tmp_path / "a.jsonl").write_text('{"text": "one", "id": 1}\n\n{"text": "two"}\n')
    (tmp_path / "notes.md").write_text("not read")
    (tmp_path / "deeper").mkdir()
    with gzip.open(tmp_path / "deeper" / "c.json.gz", "wt") as file:
        file.write('{"text": "three"}\n')
    with gzip.open(tmp_path / "deeper" / "d.txt.gz", "wt") as file:
        file.write("four")
    assert list(folder_documents(tmp_path)) == ["one", "two", "ä text\nof two lines", "three", "four"]


def test_a_long_text_file_is_several_documents_that_end_at_line_ends(tmp_path):
    text = "".join(f"line {i} of a long text\n" for i in range(10_000))
    (tmp_path / "long.txt").write_text(text)
    documents = list(folder_documents(tmp_path))
    assert "".join(documents) == text and len(documents) > 2
    assert all(document.endswith("\n") and len(document) < 2**16 + 100 for document in documents)


def test_another_field_is_read_by_its_name(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "this"}\n')
    assert list(folder_documents(tmp_path, "content")) == ["this"]


BAD = {
    "a.jsonl": [
        (b'{"text": "one"}\n{"txt": "two"}\n', "line 2 has no field 'text': its fields are txt; --field names another"),
        (b'"text"\n', "line 1 has no field 'text': it is no object"),
        (b'{"text": 3}\n', "line 1: field 'text' is no text but int"),
        (b'{"text": "one"\n', "line 1 is not JSON"),
    ],
    "a.txt": [(b"\xff\xfe", "a.txt is not UTF-8 text")],
    "a.txt.gz": [
        (b"plain", "a.txt.gz is not a whole gzip file"),
        (gzip.compress(b"text" * 1000, mtime=0)[:-20], "a.txt.gz is not a whole gzip file"),
    ],
}


@pytest.mark.parametrize(("name", "content", "said"), [(name, *case) for name, cases in BAD.items() for case in cases])
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said) as error:
        list(folder_documents(tmp_path))
    assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)


def test_a_folder_that_holds_no_text_or_is_none_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no file that ends in \.txt, \.jsonl, \.json"):
        folder_documents(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        folder_documents(tmp_path / "nowhere")


def test_python_s_documentation_is_always_there():
    documents = list(python_documentation())
    assert len(documents) > 50 and sum(map(len, documents)) > 300_000


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """Where a small TFDS data set of this test is prepared, as array_record."""
    import tensorflow_datasets as tfds

    class LittleBooks(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"text": tfds.features.Text(), "number": tfds.features.Scalar(np.int32)}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, manager):
            return {"train": self._generate_examples(20), "test": self._generate_examples(3)}

        def _generate_examples(self, books):
            for i in range(books):
                yield i, {"text": f"bôok {i}", "number": i}

    folder = tmp_path_factory.mktemp("tfds")
    LittleBooks(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def test_a_tfds_builder_is_read_by_name_without_tensorflow(books):
    assert sorted(tfds_documents("little_books", data_dir=books)) == sorted(f"bôok {i}" for i in range(20))
    assert len(list(tfds_documents("little_books", "test", books))) == 3
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize(
    ("name", "split", "field", "said"),
    [
        ("little_bocks", "train", "text", "Dataset little_bocks not found; where it is not prepared: tfds build"),
        ("little_books", "dev", "text", "Unknown split 'dev'"),
        ("little_books", "train", "words", "has no field 'words': choose one of number, text"),
        ("little_books", "train", "number", "field 'number' is no text but int"),
        ("mnist", "train", "text", "tfds build mnist --file_format=array_record"),
    ],
)
def test_what_tfds_does_not_have_is_one_line(books, name, split, field, said):
    with pytest.raises(UserError, match=said) as error:
        list(tfds_documents(name, split, books, field))
    assert "\n" not in str(error.value)


def test_lines_are_read_as_json_says(tmp_path):
    text = 'quotes " and \\ and \n and é'
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert list(folder_documents(tmp_path)) == [text]
