"""The sentence for a name that does not exist, with the nearest one that does."""

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: str, known: Iterable[str], otherwise: str) -> str:
    """`unknown model id 'x'; did you mean 'y'?`, or `otherwise` as the remedy where nothing is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"unknown {kind} '{name}'; " + (f"did you mean '{near[0]}'?" if near else otherwise)
