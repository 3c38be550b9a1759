"""phase-jax corpus: tokenise texts once, into a corpus that training reads."""

from collections.abc import Sequence
from pathlib import Path

from experiments.options import parser


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "corpus",
        "Tokenise documents into packed ArrayRecord shards with a held-out split. Without --folder or --tfds the"
        " documents are those of Python's own language reference.",
        "phase-jax corpus --folder texts --tokenizer qwen --out corpora/texts",
    )
    source = arguments.add_mutually_exclusive_group()
    source.add_argument("--folder", type=Path, help="a folder of .txt, .jsonl or .json files, each also as .gz")
    source.add_argument("--tfds", metavar="NAME", help="a TFDS builder that was prepared as array_record")
    arguments.add_argument("--split", default="train", help="of the TFDS builder (default train)")
    arguments.add_argument("--data-dir", type=Path, help="where TFDS keeps its data sets")
    arguments.add_argument("--field", default="text", help="of the documents in .jsonl and TFDS (default text)")
    arguments.add_argument("--tokenizer", default="bytes", help="bytes, qwen, deepseek or a tokenizer.json")
    arguments.add_argument("--record-tokens", type=int, default=4096, help="a multiple of the lengths to train on")
    arguments.add_argument("--held-out", type=float, default=0.05, help="share of the documents kept for validation")
    arguments.add_argument("--out", type=Path, required=True, help="the corpus's folder")
    options = arguments.parse_args(argv)

    from phase_jax.data.documents import folder_documents, python_documentation, tfds_documents

    if options.folder is not None:
        name, documents = f"folder {options.folder}", folder_documents(options.folder, options.field)
    elif options.tfds is not None:
        name = f"tfds {options.tfds} {options.split}"
        documents = tfds_documents(options.tfds, options.split, options.data_dir, options.field)
    else:
        name, documents = "pydoc_data.topics", python_documentation()
    about = make(
        documents, options.out, name, options.tokenizer, record_tokens=options.record_tokens, held_out=options.held_out
    )
    for split, counts in about["splits"].items():
        print(
            f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens in {counts['records']:,} records"
            f" of {about['record_tokens']:,}, {counts['dropped_tokens']:,} left over"
        )
    print(options.out)
    return 0


def make(documents, out: Path, source: str, tokenizer: str = "bytes", **sizes) -> dict:
    """`write_corpus` with a progress bar; returns corpus.json's content."""
    from phase_jax.data.corpus import write_corpus
    from phase_jax.data.tokenizers import load_tokenizer
    from phase_jax.progress import progress_bar

    with progress_bar() as bar:
        task = bar.add_task(out.name, total=None, note="documents")

        def progress(seen: int, tokens: int) -> None:
            bar.update(task, completed=seen, note=f"documents, {tokens / 1e6:.1f}M tokens")

        try:
            return write_corpus(documents, load_tokenizer(tokenizer), out, source=source, progress=progress, **sizes)
        except KeyboardInterrupt:
            bar.console.print("stopped; nothing is kept, the same command begins again")
            raise
