"""Gate profiles: where in their windows the gates of a trained model look (SPEC §7).

Measured over windows of phase prompts, one pass a batch; only sums leave the device. Vector gates have a softmax over
offsets in every channel: effective offsets are taken a channel and then averaged over channels, profiles are averaged.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from phase_jax.data.prompts import RECORD_LENGTH, PhasePrompts
from phase_jax.errors import UserError
from phase_jax.geometry import Windows
from phase_jax.model import ModelConfig, Transformer
from phase_jax.statistics import alignment, best_shift, effective_offsets, gate_profile
from phase_jax.statistics.gates import CONCENTRATED

BATCH = 8  # logical samples a call
BRANCHES = ("key", "value")


def check_gates(config: ModelConfig, name: str) -> None:
    """Raises UserError for a model that has no learned gates."""
    if config.windows is None:
        raise UserError(f"{name} has full attention, and so no gates: choose a compressed model")
    if config.gate == "uniform":
        raise UserError(f"{name} has uniform gates, and nothing is learned in them: choose scalar or vector gates")


def record_windows(windows: Windows, prompts: PhasePrompts) -> np.ndarray:
    """Which windows [n, R, J] are counted: those that lie wholly within the prompt and hold a token of a record."""
    n, residues, length = prompts.tokens.shape
    of_record = np.zeros((n, residues, length + 1), int)
    for part in range(RECORD_LENGTH):
        np.put_along_axis(of_record, prompts.record_position + 1 + part, 1, axis=2)
    before = of_record.cumsum(axis=2)
    starts = windows.starts(length)
    held = before[..., starts + windows.width] - before[..., starts.clip(0)]
    return (held > 0) & (starts >= 0)


@partial(jax.jit, static_argnames="model")
def gate_sums(model: Transformer, params: dict, tokens: jax.Array, counted: jax.Array) -> dict:
    """Sums over the `counted` [P, J] windows of prompts [P, T], by branch: of the weights [L, W, K, g], and of their
    effective offsets [L, K, g]. A model of tied keys and values has no value branch."""
    _, seen = model.apply({"params": params}, tokens, method="hidden_states", mutable="intermediates")
    attention = seen["intermediates"]["layers"]["attention"]
    sums = {}
    for branch in BRANCHES:
        if f"compress_{branch}" in attention:
            (gates,) = attention[f"compress_{branch}"]["gates"]
            effective = jnp.exp(jax.scipy.special.entr(gates).sum(axis=3))
            sums[branch] = (
                jnp.einsum("lpjwkg,pj->lwkg", gates, counted.astype(jnp.float32)),
                jnp.einsum("lpjkg,pj->lkg", effective, counted.astype(jnp.float32)),
            )
    return sums


def measure_gates(model: Transformer, params: dict, prompts: PhasePrompts, advance=lambda samples: None) -> dict:
    """Gate statistics of every head, by branch, and how many `windows` they are of.

    Of a branch: `mass` [L, K, W], mean weights; `profile` [L, K, S]; `static` and `per_window` effective offsets
    [L, K], in 1 … W; `peak` [L, K], the offset of the most mass. `advance` is told how many samples were read.
    Raises UserError where no window holds a record.
    """
    count, totals = gate_totals(model, params, prompts, advance)
    return {
        "windows": count,
        **{branch: _described(*sums, count, model.cfg.windows) for branch, sums in totals.items()},
    }


def gate_totals(
    model: Transformer, params: dict, prompts: PhasePrompts, advance=lambda samples: None
) -> tuple[int, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """How many windows hold a record, and `gate_sums` over all of them. Raises UserError where none does."""
    counted = record_windows(model.cfg.windows, prompts)
    count = int(counted.sum())
    if not count:
        raise UserError("no window closes within the records: choose longer prompts or narrower windows")
    n, _, length = prompts.tokens.shape
    batch, total = min(BATCH, n), None
    for start in range(0, n, batch):
        # The last batch is filled up with samples that do not count: one shape, one compilation.
        rows = np.minimum(np.arange(start, start + batch), n - 1)
        own = counted[rows] & (np.arange(start, start + batch) < n)[:, None, None]
        sums = gate_sums(model, params, prompts.tokens[rows].reshape(-1, length), own.reshape(-1, own.shape[-1]))
        sums = jax.tree.map(np.float64, jax.device_get(sums))
        total = sums if total is None else jax.tree.map(np.add, total, sums)
        advance(min(batch, n - start))
    return count, total


def _described(mass: np.ndarray, effective: np.ndarray, count: int, windows: Windows) -> dict[str, np.ndarray]:
    mean = np.moveaxis(mass / count, 1, -1)  # [L, K, g, W]
    by_head = mean.mean(axis=2)
    return {
        "mass": by_head,
        "profile": gate_profile(by_head, windows.phase(windows.start(0) + np.arange(windows.width)), windows.stride),
        "static": effective_offsets(mean).mean(axis=2),
        "per_window": (effective / count).mean(axis=2),
        "peak": by_head.argmax(axis=-1),
    }


def gates_report(config: ModelConfig, measured: list[dict]) -> dict:
    """What `measure_gates` found at successive checkpoints, as JSON: the last one's heads, and the way there.

    `heads` has one item a KV head: `layer`, `head`; for `key` and `value` (None where tied) the statistics of
    `measure_gates`; `peak_difference`, offsets from the key's peak to the value's; `best_shift` of the key's masses
    onto the value's; `concentrated`, whether the key gate covers fewer than CONCENTRATED · W offsets; `alignment`,
    which `aligned` fills in. `path` has the key gates' `static` and `per_window` [steps][L][K].
    """
    last = measured[-1]

    def described(branch: str, layer: int, head: int) -> dict | None:
        if branch not in last:
            return None
        return {name: values[layer, head].tolist() for name, values in last[branch].items()}

    heads = []
    for layer, head in np.ndindex(config.layers, config.kv_heads):
        key, value = (described(branch, layer, head) for branch in BRANCHES)
        heads.append(
            {
                "layer": layer,
                "head": head,
                "key": key,
                "value": value,
                "peak_difference": None if value is None else value["peak"] - key["peak"],
                "best_shift": None if value is None else best_shift(key["mass"], value["mass"]),
                "concentrated": key["static"] < CONCENTRATED * config.window,
                "alignment": None,
            }
        )
    return {
        "gate": config.gate,
        "width": config.window,
        "stride": config.stride,
        "windows": last["windows"],
        "heads": heads,
        "path": {name: [point["key"][name].tolist() for point in measured] for name in ("static", "per_window")},
    }


def aligned(report: dict, knockout: dict) -> dict:
    """A report of gates with every head's `alignment` with its knockout.

    `loss_by_phase` are the points lost; `correlation` and `p_value` of their ranks and the key gate's profile leave out
    the boundary phase where W = S, since no entry holds a key there and what follows it. `specialised`: answers are
    lost, and not the same share of them at every residue (Holm's p < 0.05). None for a head without a knockout.
    """
    alone = {entry["name"]: entry for entry in knockout["knockouts"] if entry["kind"] == "head"}
    within = slice(0, -1 if report["width"] == report["stride"] else None)

    def of_head(head: dict) -> dict | None:
        entry = alone.get(f"{head['layer']}.{head['head']}")
        if entry is None:
            return None
        loss, p_value = entry["loss_by_phase"], entry.get("p_relative_holm")
        specialised = entry["mean_interval"][1] < 0 and p_value is not None and p_value < 0.05
        found = alignment(head["key"]["profile"][within], loss[within])
        return {"loss_by_phase": loss, "specialised": specialised, **found}

    return {**report, "heads": [{**head, "alignment": of_head(head)} for head in report["heads"]]}
