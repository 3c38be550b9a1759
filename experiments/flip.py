"""phase-jax flip: does the length of an irrelevant filler decide how a code prompt is completed?"""

from collections.abc import Sequence
from pathlib import Path

from experiments.evaluate import trained
from experiments.options import parser
from phase_jax.data.completion import EXAMPLE, EXAMPLE_RIGHT, EXAMPLE_WRONG, FILLERS, LENGTHS, SLOT, completion_prompts
from phase_jax.data.tokenizers import Tokenizer, load_tokenizer, special_token
from phase_jax.errors import UserError
from phase_jax.run import RunConfig, RunFolder, write_json
from phase_jax.statistics.sweep import SHORTEST


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "flip",
        "Lengthen a filler in front of a code prompt token by token, and look for a period in the odds of a right and a"
        f" wrong continuation. The template is text with {SLOT} in it once; without one, a small example of ours is"
        " used.",
        "phase-jax flip --workdir=runs/text --template=prompt.txt --right=64 --wrong=16",
    )
    arguments.add_argument("--workdir", type=Path, required=True, help="the folder of a run trained on text")
    arguments.add_argument("--template", type=Path, metavar="FILE", help=f"text with {SLOT} in it once")
    arguments.add_argument("--right", metavar="TEXT", help="the right continuation, of one or several tokens")
    arguments.add_argument("--wrong", metavar="TEXT", help="the wrong continuation")
    arguments.add_argument(
        "--lengths", default=f"{LENGTHS[0]}:{LENGTHS[-1]}", metavar="A:B", help="filler tokens, both ends included"
    )
    arguments.add_argument(
        "--fillers", nargs="+", default=list(FILLERS), metavar="NAME", help=f"of {', '.join(FILLERS)}"
    )
    arguments.add_argument(
        "--tokenizer", metavar="NAME", help="bytes, qwen, deepseek or a tokenizer.json (default: the run's)"
    )
    arguments.add_argument(
        "--bos", choices=("none", "own", "end-of-text"), default="none", help="the token at position 0 (default none)"
    )
    arguments.add_argument("--out", type=Path, metavar="PATH", help="results, no ending (default WORKDIR/flip/NAME)")
    options = arguments.parse_args(argv)
    folder = RunFolder(options.workdir)
    config = trained(folder)
    tokenizer = tokenizer_of(config, folder, options.tokenizer)
    template, right, wrong = completion(options.template, options.right, options.wrong)
    prompts = completion_prompts(
        tokenizer,
        template,
        right,
        wrong,
        lengths=filler_lengths(options.lengths),
        fillers=options.fillers,
        first=special_token(tokenizer, options.bos),
    )

    from experiments.runtime import prepare
    from phase_jax.evaluation.flip import completion_flip, model_scorer
    from phase_jax.model import Transformer
    from phase_jax.reports.figures import render, write
    from phase_jax.reports.flip import flip_figure, flip_sentence
    from phase_jax.training.loop import load_params

    prepare()
    name = options.template.stem if options.template else "example"
    out = options.out or folder.path / "flip" / name
    journal = out.with_name(f"{out.name}.journal")
    scorer = model_scorer(Transformer(config.model), load_params(config, folder), f"{config.id} flip", journal)
    report = {
        "model": config.id,
        "S": config.model.stride,
        "tokenizer": tokenizer.name,
        "prompt_tokens": prompts.tokens.shape[-1],
        "trained_length": config.data.length,
        "right_text": right,
        "wrong_text": wrong,
        **completion_flip(prompts, scorer),
    }
    report["sentence"] = flip_sentence(report)
    file = out.with_name(f"{out.name}.json")
    write_json(file, report)
    images = write(render(flip_figure(report)), out)
    journal.unlink()
    print(f"{config.id}: {report['sentence']}")
    if report["prompt_tokens"] > report["trained_length"]:
        print(
            f"Its prompts are longer ({report['prompt_tokens']} tokens) than what it was trained on"
            f" ({report['trained_length']})."
        )
    print(", ".join(map(str, (file, *images))))
    return 0


def tokenizer_of(config: RunConfig, folder: RunFolder, name: str | None) -> Tokenizer:
    """The tokenizer of that name, or the run's. Raises UserError where there is none, or it is not the model's."""
    name = name or getattr(config.data, "tokenizer", None)
    if name is None:
        raise UserError(
            f"{folder.path} was trained on the recall task, not on text; --tokenizer names one if its model knows it"
        )
    tokenizer = load_tokenizer(name)
    if tokenizer.size > config.model.vocabulary:
        raise UserError(
            f"{folder.path}: its model has {config.model.vocabulary} token ids, tokenizer '{tokenizer.name}'"
            f" {tokenizer.size}: it was trained on another vocabulary"
        )
    return tokenizer


def completion(template: Path | None, right: str | None, wrong: str | None) -> tuple[str, str, str]:
    """(template, right, wrong), of the example where there is no template. Raises UserError for what is missing."""
    if template is None:
        return EXAMPLE, EXAMPLE_RIGHT if right is None else right, EXAMPLE_WRONG if wrong is None else wrong
    if right is None or wrong is None:
        raise UserError("--template needs --right and --wrong, the two continuations to compare")
    try:
        # The prompt stops inside a line; that the file ends with a line end is the editor's doing.
        return template.read_text(encoding="utf-8").removesuffix("\n"), right, wrong
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--template {template}: cannot be read as text ({error})") from None


def filler_lengths(text: str) -> range:
    """`24:39` as a range with both ends. Raises UserError for another form, or fewer lengths than a period needs."""
    try:
        first, last = map(int, text.split(":"))
    except ValueError:
        raise UserError(f"--lengths {text}: write first:last, for example {LENGTHS[0]}:{LENGTHS[-1]}") from None
    if first < 1 or last - first + 1 < SHORTEST:
        raise UserError(f"--lengths {text}: a period needs {SHORTEST} lengths or more in a row, from 1 up")
    return range(first, last + 1)
