"""Knockouts: what is lost when heads say, at the end of a prompt, only what they say on average (SPEC §7).

The outputs of query heads, before the output projection, are replaced by their mean over calibration prompts. Only the
last positions change, so one prefill of all others serves every knockout of a prompt; each then runs the last positions
through the layers from its own on, where entries that close among them are built anew.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from phase_jax.data.prompts import PhasePrompts
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.errors import UserError
from phase_jax.evaluation.runner import fingerprint, on_all_devices, over_devices, score_samples
from phase_jax.evaluation.sweep import scores_of
from phase_jax.model import Heads, Intervention, ModelConfig, Transformer
from phase_jax.model.cache import Cache, empty_cache, extend_unchecked
from phase_jax.model.transformer import Block, turns
from phase_jax.statistics import change_report, holm, summarise

BATCH = 8  # logical samples a call on each device

HeadSet = tuple[tuple[int, int], ...]  # (layer, KV head) each


@dataclasses.dataclass(frozen=True)
class Knockout:
    """Replaces the query heads `where` [L, N] at the last `band` positions.

    `kind`: head (one KV head), set (several), control (query heads drawn at random), layer (all of one layer).
    """

    name: str
    kind: str
    where: np.ndarray
    band: int = 1

    @property
    def first(self) -> int:
        """The lowest layer that is changed; 0 where none is."""
        return int(self.where.any(axis=1).argmax())


def parse_heads(text: str, config: ModelConfig) -> HeadSet:
    """The heads of `0.1+2.0`: KV head 1 of layer 0, KV head 0 of layer 2. Raises UserError for what does not exist."""
    heads = []
    for part in text.split("+"):
        layer, dot, head = part.partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise UserError(f"heads '{text}': write LAYER.HEAD, and + between several, as in 0.0+1.0")
        if int(layer) >= config.layers or int(head) >= config.kv_heads:
            raise UserError(
                f"there is no head {part}: layers are 0 to {config.layers - 1}, KV heads 0 to {config.kv_heads - 1}"
            )
        heads.append((int(layer), int(head)))
    if len(set(heads)) < len(heads):
        raise UserError(f"heads '{text}': one of them is named twice")
    return tuple(sorted(heads))


def knock_out(heads: HeadSet, config: ModelConfig) -> Knockout:
    """The knockout of KV heads: all query heads that read them, at the last position."""
    where = np.zeros((config.layers, config.kv_heads, config.query_heads // config.kv_heads), bool)
    for layer, head in heads:
        where[layer, head] = True
    name = "+".join(f"{layer}.{head}" for layer, head in heads)
    kind = "head" if len(heads) == 1 else "set"
    return Knockout(name, kind, where.reshape(config.layers, config.query_heads))


def knockouts(
    config: ModelConfig, length: int, sets: Sequence[HeadSet] = (), band: int = 1, controls: int = 0, seed: int = 0
) -> list[Knockout]:
    """Every KV head alone, then the `sets`, then every whole layer over the last `band` positions, then controls.

    A control replaces as many query heads as some head or set does, drawn at random over the whole model: `controls` of
    them for each such number. Raises UserError for a band that prompts of `length` tokens do not have.
    """
    if not 1 <= band < length:
        raise UserError(f"--band {band}: choose from 1 to {length - 1} last positions of prompts of {length} tokens")
    if controls < 0:
        raise UserError(f"--controls {controls}: none is 0, and there are no fewer")
    alone = [((layer, head),) for layer in range(config.layers) for head in range(config.kv_heads)]
    chosen = [knock_out(heads, config) for heads in (*alone, *sets)]
    layers = [
        Knockout(
            f"layer {layer}", "layer", np.arange(config.layers)[:, None] == np.full(config.query_heads, layer), band
        )
        for layer in range(config.layers)
    ]
    rng = np.random.default_rng([seed, 3])
    total = config.layers * config.query_heads
    drawn = []
    for size in sorted({int(knockout.where.sum()) for knockout in chosen} - {total}):
        for number in range(controls):
            where = np.isin(np.arange(total), rng.permutation(total)[:size])
            name = f"control {number + 1} of {size}"
            drawn.append(Knockout(name, "control", where.reshape(config.layers, config.query_heads)))
    return [*chosen, *layers, *drawn]


class Group(NamedTuple):
    """Knockouts of one band, stacked: where they begin [C], what they replace [C, L, N], and by what, for all prompts
    or for each residue, [L, 1 or R, band, N, H]."""

    first: jax.Array
    where: jax.Array
    value: jax.Array


def _read(model: Transformer, params: dict, cache: Cache, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reads tokens [B, t] after the cache: logits of the next one [B, V], what went into the layers [L, B, t, D] and
    what their heads said [L, B, t, N, H]."""
    variables = {"params": params}
    (hidden, _), left = model.apply(
        variables, tokens, cache.length, cache.layers, method="extend", mutable="intermediates"
    )
    layers = left["intermediates"]["layers"]
    return model.apply(variables, hidden[:, -1], method="logits"), layers["hidden"][0], layers["attention"]["heads"][0]


def resume(
    model: Transformer, params: dict, cache: Cache, inputs: jax.Array, first: jax.Array, change: Intervention
) -> jax.Array:
    """What the last layer leaves [B, t, D] of tokens after the cache, changed from layer `first` on.

    `inputs` [L, B, t, D] went into the layers without a change, so that those below `first` need not run again.
    """
    turn = turns(model.cfg, inputs.shape[2], cache.length)
    layers = params["layers"], cache.layers, change

    def one(layer, hidden):
        own, kept, changed = jax.tree.map(lambda leaf: leaf[layer], layers)
        return Block(model.cfg).apply({"params": own}, hidden, turn, cache.length, kept, changed)[0]

    return jax.lax.fori_loop(first, model.cfg.layers, one, inputs[first])


@partial(jax.jit, static_argnames=("model", "vocabulary", "bands"))
def score(
    model: Transformer,
    vocabulary: Vocabulary,
    bands: tuple[int, ...],
    shared: tuple[dict, tuple[Group, ...]],
    tokens: jax.Array,
    answer: jax.Array,
) -> dict:
    """Scores tokens [B, R, T] against answers [B] as they are and under all knockouts: a dict of [B, 1 + C, R].

    `shared` are the parameters and a group of knockouts for each of `bands`, which shrink.
    """

    def on_one_device(shared, tokens, answer):
        params, groups = shared
        samples, residues, length = tokens.shape
        tokens = tokens.reshape(-1, length)
        cache, done = empty_cache(model.cfg, len(tokens), length), 0
        logits = []
        for band, group in zip(bands, groups, strict=True):
            if done < length - band:
                _, cache = extend_unchecked(model, params, cache, tokens[:, done : length - band])
                done = length - band
            clean, inputs, _ = _read(model, params, cache, tokens[:, done:])
            value = group.value
            if value.shape[1] > 1:
                value = jnp.tile(value, (1, samples, 1, 1, 1))

            def knocked_out(first_and_where, cache=cache, inputs=inputs, value=value):
                first, where = first_and_where
                hidden = resume(model, params, cache, inputs, first, Intervention(Heads(where[:, None, None], value)))
                return model.apply({"params": params}, hidden[:, -1], method="logits")

            logits.append(jax.lax.map(knocked_out, (group.first, group.where)))
        logits = jnp.concatenate([clean[None], *logits])
        by_sample = jnp.moveaxis(logits.reshape(len(logits), samples, residues, -1), 0, 1)
        return scores_of(by_sample, answer[:, None, None], vocabulary)

    return over_devices(on_one_device)(shared, tokens, answer)


@partial(jax.jit, static_argnames=("model", "band", "phases"))
def _said(model: Transformer, band: int, phases: int, params: dict, tokens: jax.Array) -> dict:
    """What heads say at the last `band` positions of tokens [B, R, T], averaged over residues of one phase."""

    def on_one_device(params, tokens):
        samples, _, length = tokens.shape
        tokens = tokens.reshape(-1, length)
        cache = empty_cache(model.cfg, len(tokens), length)
        _, cache = extend_unchecked(model, params, cache, tokens[:, : length - band])
        _, _, heads = _read(model, params, cache, tokens[:, length - band :])
        layers, _, *rest = heads.shape
        heads = heads.astype(jnp.float32).reshape(layers, samples, -1, phases, *rest)
        return {"heads": jnp.moveaxis(heads.mean(axis=2), 0, 2)}

    return over_devices(on_one_device)(params, tokens)


def calibrate(
    model: Transformer, params: dict, prompts: PhasePrompts, band: int, phases: int, label: str
) -> np.ndarray:
    """Mean outputs of every query head at the last `band` positions, [L, phases, band, N, H].

    With `phases` 1 the mean is over all prompts; with S (a divisor of R) over those of each phase of the target.
    """
    outputs = score_samples(
        partial(_said, model, band, phases, on_all_devices(params)),
        zip(prompts.tokens, strict=True),
        len(prompts.answer),
        batch=BATCH,
        made_of=fingerprint({"score": "calibration", "band": band, "phases": phases}, params),
        label=label,
    )["heads"]
    return np.moveaxis(outputs.mean(axis=0, dtype=np.float64), 0, 1).astype(np.float32)


def digest(tokens: np.ndarray) -> str:
    """SHA-256 of prompts [n, R, T], as hexadecimal digits."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).hexdigest()


def check_disjoint(calibration: np.ndarray, evaluation: np.ndarray) -> None:
    """Raises UserError where a prompt of one [n, R, T] is a prompt of the other."""
    known = {prompt.tobytes() for prompt in evaluation.reshape(-1, evaluation.shape[-1])}
    shared = sum(prompt.tobytes() in known for prompt in calibration.reshape(-1, calibration.shape[-1]))
    if shared:
        raise UserError(
            f"{shared} of {calibration[..., 0].size} calibration prompts are evaluation prompts, too: choose another"
            " --calibration-seed"
        )


def measure(
    model: Transformer,
    params: dict,
    prompts: PhasePrompts,
    vocabulary: Vocabulary,
    plan: Sequence[Knockout],
    means: np.ndarray,
    label: str,
    journal: Path | None = None,
) -> dict:
    """Scores of all prompts, as they are and then under each knockout: arrays [n, 1 + C, R] (see `scores_of`).

    `means` [L, phases, band, N, H] are `calibrate`'s, of at least as many last positions as any knockout changes.
    """
    residues = prompts.tokens.shape[1]
    value = np.tile(means, (1, residues // means.shape[1], 1, 1, 1)) if means.shape[1] > 1 else means
    bands = tuple(sorted({knockout.band for knockout in plan}, reverse=True))
    own = [[place for place, knockout in enumerate(plan) if knockout.band == band] for band in bands]
    groups = tuple(
        Group(
            np.array([plan[place].first for place in places], np.int32),
            np.stack([plan[place].where for place in places]),
            value[:, :, value.shape[2] - band :],
        )
        for band, places in zip(bands, own, strict=True)
    )
    shared = on_all_devices((params, groups))
    settings = {"score": "knockout", "model": dataclasses.asdict(model.cfg), "bands": bands}
    scores = score_samples(
        partial(score, model, vocabulary, bands, shared),
        zip(prompts.tokens, prompts.answer, strict=True),
        len(prompts.answer),
        batch=BATCH,
        made_of=fingerprint(settings, shared),
        label=label,
        journal=journal,
    )
    order = np.argsort([0, *(1 + place for places in own for place in places)])
    return {name: values[:, order] for name, values in scores.items()}


def knockout_report(scores: dict, plan: Sequence[Knockout], config: ModelConfig) -> dict:
    """What `measure` found, as JSON: `clean` numbers and, for each knockout, `change_report` of it.

    The p values of KV heads alone are also adjusted by Holm over these heads (`p_loss_holm`, `p_relative_holm`).
    """
    correct, nll = (np.moveaxis(scores[name], 1, 0) for name in ("correct", "nll"))
    entries = []
    for knockout, own, own_nll in zip(plan, correct[1:], nll[1:], strict=True):
        changed = [[int(layer), int(head)] for layer, head in np.argwhere(knockout.where)]
        entry = {"name": knockout.name, "kind": knockout.kind, "band": knockout.band, "query_heads": changed}
        entries.append(entry | change_report(own, correct[0], own_nll, nll[0], config.stride))
    alone = [entry for entry in entries if entry["kind"] == "head"]
    for name in ("p_loss", "p_relative"):
        if all(entry[name] is not None for entry in alone):
            for entry, adjusted in zip(alone, holm([entry[name] for entry in alone]), strict=True):
                entry[f"{name}_holm"] = float(adjusted)
    accuracy = correct[0].mean(axis=0)
    clean = {"accuracy": accuracy.tolist(), **summarise(accuracy), "nll": float(nll[0].mean())}
    return {"clean": clean, "knockouts": entries}
