"""Prompts of the completion flip: code that stops before a word, and filler in front of it that grows by one token.

A prompt is the ids of the text before the slot, L filler tokens, the ids of the text behind it, and a continuation.
Ids are put together, never encoded together: the filler is L tokens whatever the tokenizer would make of its text.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from phase_jax.data.tokenizers import Tokenizer, token_of
from phase_jax.errors import UserError
from phase_jax.suggest import unknown

SLOT = "{filler}"
LENGTHS = range(24, 40)

# One token each. All but `mixed` repeat one: a pattern of several would have a period of its own.
FILLERS = {"equals": "=", "dashes": "-", "dots": ".", "mixed": "=-.~*+#:"}

EXAMPLE = f'''"""
{SLOT}
"""

def read_int16(data):
    return unpack("h", data, bits=16)

def read_float64(data):
    return unpack("d", data, bits='''
EXAMPLE_RIGHT, EXAMPLE_WRONG = "64", "16"


@dataclasses.dataclass(frozen=True)
class CompletionPrompts:
    """Every filler family at every length, families first: n = families · lengths.

    `tokens` [n, 2, T] end in the right continuation and in the wrong one, which begin at position `start` [n] and have
    `count` [2] tokens; what is behind them is the last token again, and no causal model can see it.
    """

    tokens: np.ndarray
    start: np.ndarray
    count: np.ndarray
    fillers: tuple[str, ...]
    lengths: np.ndarray


def completion_prompts(
    tokenizer: Tokenizer,
    template: str,
    right: str,
    wrong: str,
    *,
    lengths: Sequence[int] = LENGTHS,
    fillers: Sequence[str] = tuple(FILLERS),
    first: int | None = None,
) -> CompletionPrompts:
    """Builds the prompts; `first` is the id of a token at position 0, if there is to be one.

    Raises UserError for a template without a slot or with more, a continuation that is empty or the other one's
    beginning, a filler that is unknown, or a filler character that is no token.
    """
    if template.count(SLOT) != 1:
        raise UserError(f"the template has {template.count(SLOT)} slots: write {SLOT} in it once, where filler goes")
    before, behind = template.split(SLOT)
    if not behind:
        raise UserError(f"the template ends with {SLOT}: the code that is to be continued goes behind it")
    continuations = [tokenizer.encode(text) for text in (right, wrong)]
    for name, text, ids in zip(("right", "wrong"), (right, wrong), continuations, strict=True):
        if not ids:
            raise UserError(f"the {name} continuation is empty: its probability would be 1")
        other = continuations[name == "right"]
        if other[: len(ids)] == ids:
            raise UserError(f"the {name} continuation {text!r} begins the other one: it can never be less probable")
    rows, start = [], []
    head, tail = [*([] if first is None else [first]), *tokenizer.encode(before)], tokenizer.encode(behind)
    for name in fillers:
        filler = filler_tokens(tokenizer, name, max(lengths))
        for length in lengths:
            prompt = head + filler[len(filler) - length :] + tail
            start.append(len(prompt))
            rows.append([prompt + ids for ids in continuations])
    longest = max(len(ids) for row in rows for ids in row)
    tokens = [[ids + ids[-1:] * (longest - len(ids)) for ids in row] for row in rows]
    return CompletionPrompts(
        np.array(tokens, np.int32),
        np.array(start),
        np.array([len(ids) for ids in continuations]),
        tuple(fillers),
        np.array(lengths),
    )


def filler_tokens(tokenizer: Tokenizer, name: str, length: int) -> list[int]:
    """So many ids of a family. A shorter filler is the end of a longer one: what is next to the code stays there."""
    if name not in FILLERS:
        raise UserError(unknown("filler", name, FILLERS, f"choose {', '.join(FILLERS)}"))
    ids = [token_of(tokenizer, character) for character in FILLERS[name]]
    return [ids[i] for i in np.random.default_rng(0).integers(0, len(ids), length)]
