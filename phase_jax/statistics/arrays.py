"""What goes in and what comes out: checked arrays of right and wrong answers, folding, and JSON without NaN.

`correct[N, R]` everywhere is one row a logical sample (N of them) and one column a residue (R of them).
"""

import math

import numpy as np


def as_correct(correct) -> np.ndarray:
    """Check an array of right (1) and wrong (0) answers and return it as bool `[N, R]`.

    Raises ValueError, in one line that names what is wrong, for ragged rows, NaN, values other than 0 and
    1, no rows, or fewer than two residues.
    """
    try:
        array = np.asarray(correct)
    except ValueError:
        raise ValueError("correct: the rows differ in length; every logical sample needs all residues") from None
    if array.ndim != 2:
        raise ValueError(f"correct: expected [N, R], got an array of shape {array.shape}")
    rows, residues = array.shape
    if rows < 1 or residues < 2:
        raise ValueError(f"correct: needs at least 1 logical sample and 2 residues, got {rows} x {residues}")
    if array.dtype == bool:
        return array
    try:
        array = array.astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError("correct: every value must be 0 or 1") from None
    if np.isnan(array).any():
        row, residue = np.argwhere(np.isnan(array))[0]
        raise ValueError(f"correct: NaN at logical sample {row}, residue {residue}; leave out or redo that sample")
    if not np.isin(array, (0.0, 1.0)).all():
        raise ValueError("correct: every value must be 0 or 1")
    return array.astype(bool)


def check_stride(stride: int, residues: int) -> int:
    """Return `stride` if the R residues are whole strides. Raises ValueError if not."""
    if stride < 1 or residues % stride:
        raise ValueError(f"stride {stride} does not divide the {residues} residues; sweep a multiple of the stride")
    return int(stride)


def fold(values, stride: int) -> np.ndarray:
    """Average `values[..., R]` over the residues that share a phase (residue mod S): `[..., S]`.

    Raises ValueError if S does not divide R.
    """
    values = np.asarray(values, dtype=np.float64)
    stride = check_stride(stride, values.shape[-1])
    return values.reshape(*values.shape[:-1], -1, stride).mean(axis=-2)


def to_json(value):
    """Turn numpy values into plain Python ones that JSON can hold; NaN and infinities become None (null)."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
