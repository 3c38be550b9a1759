"""Qwen3's weights in Hugging Face's form, in and out: config.json and safetensors files (Qwen Team 2025).

The full-attention models of the family have Qwen3's architecture: their parameters and Qwen3's are the same numbers in
another order. A tensor of theirs is a matrix [outputs, inputs]; ours are [inputs, heads, H], stacked over layers.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from phase_jax.errors import UserError
from phase_jax.model.config import ModelConfig

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
_CONFIG, _INDEX, _SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"


class _Leaf(NamedTuple):
    """A parameter of ours and the tensor that it is: `theirs` names it, with {} for the layer where there is one."""

    ours: tuple[str, ...]
    theirs: str
    shape: tuple[int, ...]  # theirs
    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


def _leaves(cfg: ModelConfig) -> list[_Leaf]:
    """Every parameter of a full-attention model."""
    d, h, n, k, f = cfg.width, cfg.head_dim, cfg.query_heads, cfg.kv_heads, cfg.mlp_width

    def same(ours, theirs, *shape):
        return _Leaf(ours, theirs, shape, lambda x: x, lambda x: x)

    def turned(ours, theirs, *shape):
        return _Leaf(ours, theirs, shape, np.transpose, np.transpose)

    def to_heads(name, theirs, heads):
        return _Leaf(
            ("layers", "attention", name),
            theirs,
            (heads * h, d),
            lambda x: x.T.reshape(d, heads, h),
            lambda x: x.reshape(d, heads * h).T,
        )

    layer, attention, mlp = "model.layers.{}.", "model.layers.{}.self_attn.", "model.layers.{}.mlp."
    leaves = [
        same(("embedding",), "model.embed_tokens.weight", cfg.vocabulary, d),
        same(("layers", "attention_norm"), layer + "input_layernorm.weight", d),
        same(("layers", "attention", "q_norm"), attention + "q_norm.weight", h),
        same(("layers", "attention", "k_norm"), attention + "k_norm.weight", h),
        to_heads("query", attention + "q_proj.weight", n),
        to_heads("key", attention + "k_proj.weight", k),
        to_heads("value", attention + "v_proj.weight", k),
        _Leaf(
            ("layers", "attention", "out"),
            attention + "o_proj.weight",
            (d, n * h),
            lambda x: x.T.reshape(n, h, d),
            lambda x: x.reshape(n * h, d).T,
        ),
        same(("layers", "mlp_norm"), layer + "post_attention_layernorm.weight", d),
        turned(("layers", "mlp", "gate"), mlp + "gate_proj.weight", f, d),
        turned(("layers", "mlp", "up"), mlp + "up_proj.weight", f, d),
        turned(("layers", "mlp", "down"), mlp + "down_proj.weight", d, f),
        same(("final_norm",), "model.norm.weight", d),
    ]
    return leaves if cfg.tied_embeddings else [*leaves, same(("unembedding",), "lm_head.weight", cfg.vocabulary, d)]


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a Hugging Face checkpoint, of whatever model, and no run's."""
    return (folder / _CONFIG).is_file() and "model_type" in _read_json(folder / _CONFIG)


def read_config(folder: Path) -> ModelConfig:
    """The model that a checkpoint's config.json describes, with activations in f32.

    Raises UserError where it is missing, no Qwen3's, or asks for something that these models do not have.
    """
    values = _read_json(folder / _CONFIG)
    if values.get("model_type") != "qwen3":
        raise UserError(f"{folder / _CONFIG}: model_type is {values.get('model_type')!r}, not 'qwen3'")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    for name, given, wanted in (
        ("hidden_act", values.get("hidden_act", "silu"), "silu"),
        ("attention_bias", values.get("attention_bias", False), False),
        ("use_sliding_window", values.get("use_sliding_window", False), False),
        ("the type of RoPE", rope.get("rope_type", rope.get("type", "default")), "default"),
    ):
        if given != wanted:
            raise UserError(f"{folder / _CONFIG}: {name} is {given!r}, and only {wanted!r} can be read")
    try:
        return ModelConfig(
            layers=values["num_hidden_layers"],
            width=values["hidden_size"],
            query_heads=values["num_attention_heads"],
            kv_heads=values["num_key_value_heads"],
            head_dim=values.get("head_dim", 128),  # the default of Qwen3's configuration
            mlp_width=values["intermediate_size"],
            vocabulary=values["vocab_size"],
            rope_theta=float(rope.get("rope_theta", values.get("rope_theta", 10_000.0))),
            norm_eps=values["rms_norm_eps"],
            tied_embeddings=values.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise UserError(f"{folder / _CONFIG} has no {error}: it is no whole Qwen3 configuration") from None
    except ValueError as error:
        raise UserError(f"{folder / _CONFIG}: {error}") from None


def read(folder: Path) -> tuple[ModelConfig, dict]:
    """The model of a Hugging Face folder and its parameters, numpy f32: one tensor at a time is read and converted.

    Raises UserError where the folder is no checkpoint, or a tensor is missing, too many or of another shape.
    """
    cfg = read_config(folder)
    params: dict[str, Any] = {}
    tensors = dict(_tensors(folder))
    for leaf in _leaves(cfg):
        names = [leaf.theirs.format(n) for n in range(cfg.layers)] if "{}" in leaf.theirs else [leaf.theirs]
        parts = [leaf.read(_take(tensors, folder, name, leaf.shape)) for name in names]
        _put(params, leaf.ours, np.stack(parts) if "{}" in leaf.theirs else parts[0])
    if cfg.tied_embeddings:
        tensors.pop("lm_head.weight", None)  # some files store the tied matrix twice
    if tensors:
        raise UserError(f"{folder}: {len(tensors)} tensors are none of this model's, such as {min(tensors)}")
    return cfg, params


def check_writable(folder: Path, cfg: ModelConfig) -> None:
    """Raises UserError for a model that Qwen3 has no place for, or a folder that holds something."""
    if cfg.windows is not None:
        raise UserError(
            f"a model with compressed attention (W{cfg.window}/S{cfg.stride}) is no Qwen3: only full attention, such"
            " as a run of full_attn_1kv, can be written"
        )
    differs = {"qk_norm": True, "tied_kv": False, "rotated": cfg.head_dim}
    if wrong := [name for name, value in differs.items() if getattr(cfg, name) != value]:
        raise UserError(f"a model with {wrong[0]} {getattr(cfg, wrong[0])} is no Qwen3's and cannot be written as one")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} exists: choose another folder or remove that one")


def write(folder: Path, cfg: ModelConfig, params: dict, dtype: str = "bfloat16", shard_bytes: int = 5 << 30) -> None:
    """Writes a full-attention model as a Hugging Face folder, in files of at most `shard_bytes` (or one tensor).

    The folder appears whole or not at all. A logit scale, which Qwen3 has none of, goes into the last norm. Raises
    UserError as `check_writable` does, or for an unknown dtype.
    """
    check_writable(folder, cfg)
    if dtype not in _DTYPES:
        raise UserError(f"dtype '{dtype}': choose {', '.join(_DTYPES)}")
    params = {**params, "final_norm": cfg.logit_scale * params["final_norm"]}
    unfinished = folder.absolute().with_name(folder.absolute().name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        _write_json(unfinished / _CONFIG, _their_config(cfg, dtype))
        _write_files(unfinished, _theirs(cfg, params, _DTYPES[dtype]), shard_bytes)
        unfinished.replace(folder)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


def _their_config(cfg: ModelConfig, dtype: str) -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": cfg.layers,
        "hidden_size": cfg.width,
        "num_attention_heads": cfg.query_heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.mlp_width,
        "vocab_size": cfg.vocabulary,
        "rope_theta": cfg.rope_theta,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": dtype,
    }


def _theirs(cfg: ModelConfig, params: dict, dtype: type) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) of every tensor in their order."""
    for leaf in _leaves(cfg):
        value = np.asarray(_get(params, leaf.ours))
        if "{}" not in leaf.theirs:
            yield leaf.theirs, np.ascontiguousarray(leaf.write(value).astype(dtype))
            continue
        for n in range(cfg.layers):
            yield leaf.theirs.format(n), np.ascontiguousarray(leaf.write(value[n]).astype(dtype))


def _write_files(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], shard_bytes: int) -> None:
    """One model.safetensors, or numbered shards with an index; no more than a shard is held."""
    shards: list[list[str]] = []
    held: dict[str, np.ndarray] = {}
    total = 0

    def flush():
        shards.append(list(held))
        file = folder / f"shard-{len(shards)}"
        save_file(held, file, metadata={"format": "pt"})
        shutil.copymode(folder / _CONFIG, file)  # it is made for its owner alone
        held.clear()

    for name, tensor in tensors:
        if held and sum(x.nbytes for x in held.values()) + tensor.nbytes > shard_bytes:
            flush()
        held[name] = tensor
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "shard-1").rename(folder / _SINGLE)
        return
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for i, file in enumerate(files, 1):
        (folder / f"shard-{i}").rename(folder / file)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
    }
    _write_json(folder / _INDEX, index)


def _tensors(folder: Path) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """(name, how to read it) of every tensor in the folder's files."""
    if (folder / _INDEX).is_file():
        weight_map = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{folder / _INDEX} has no weight_map: it is no index of a checkpoint")
        files = sorted(set(weight_map.values()))
    elif (folder / _SINGLE).is_file():
        files = [_SINGLE]
    else:
        raise UserError(f"{folder} holds no checkpoint: neither {_SINGLE} nor {_INDEX} is there")
    for file in files:
        try:
            opened = safe_open(folder / file, framework="numpy")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / file} cannot be read as safetensors: {error}") from error
        for name in opened.keys():  # noqa: SIM118 -- it is no dict
            yield name, partial(opened.get_tensor, name)


def _take(tensors: dict, folder: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in tensors:
        raise UserError(f"{folder} lacks the tensor {name}, which the model of its config.json has")
    tensor = tensors.pop(name)()
    if tensor.shape != shape:
        raise UserError(f"{folder}: {name} has shape {tensor.shape}, and config.json asks for {shape}")
    return tensor.astype(np.float32)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {path.parent} is no Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _put(tree: dict, path: tuple[str, ...], value: np.ndarray) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _get(tree: dict, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree
