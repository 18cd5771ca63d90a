"""GGUF files of tiny models, and the models of the numbers that the files hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from qdsl.checkpoint.files.ggml_types import BY_NAME, TORCH, WEIGHTLESS
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.gguf_write import NewTensor, write
from qdsl.models.gguf_maps import FOLDER as MAPS
from qdsl.models.gguf_maps import LATENT, GgufMap, latent_parts, rows_of, source_tensors
from tests.support.tiny_models import tiny_model

UNCHANGED = ("norm", "conv", "router", "A_log")                  # in names of parameters that converters do not quantize


def file_tensors(model: Any, recorded: GgufMap) -> dict[str, Tensor]:
    """The tensors of a model's GGUF file: the rules of its map the other way round."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in own_tensors(model).items():
        rule = recorded.rule(name)
        assert rule is not None, name
        tensors |= zip(rule.sources, source_tensors(rule, tensor, model.config), strict=True)
    return tensors


def own_tensors(model: Any) -> dict[str, Tensor]:
    """A model's parameters and buffers that are saved, those that share their numbers once."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (name, tensor.detach()))
    return dict(tensors.values())


def types_of(model: Any, recorded: GgufMap, *kinds: str) -> dict[str, str]:
    """The types of a file's tensors: matrices whose rows are whole blocks have the given ones in turn, all others F32."""
    types: dict[str, str] = {}
    turns = cycle(kinds)
    for name, tensor in own_tensors(model).items():
        rule = recorded.rule(name)
        assert rule is not None, name
        plain = tensor.dim() < 2 or rule.elements or rule.values or rule.rows == LATENT or any(part in name for part in UNCHANGED)
        type, columns = "F32" if plain else next(turns), rows_of(tensor, rule).shape[1]
        types |= dict.fromkeys(rule.sources, "F32" if columns % BY_NAME[type].elements else type)
    return types


def settings_of(config: Any, architecture: str) -> dict[str, Value]:
    """The settings of a file that models such as Llama and Qwen3 need."""
    numbers = {"context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
               "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
               "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
               "attention.key_length": config.head_dim}
    real = {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": config.rope_parameters["rope_theta"]}
    return {f"{architecture}.{key}": Value.of("f32" if key in real else "u32", value) for key, value in (numbers | real).items()}


def vocabulary(size: int) -> dict[str, Value]:
    """The settings of a file with so many byte-level tokens, 257 at least, of which one is merged from two."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values(), "Ġa", *(f"<{number}>" for number in range(257, size))]
    texts = {"model": Value.of("string", "gpt2"), "pre": Value.of("string", "gpt-2"), "tokens": Value.of("string[]", tokens),
             "merges": Value.of("string[]", ["Ġ a"])}
    special = {f"{name}_token_id": Value.of("u32", number) for name, number in {"bos": 1, "eos": 2, "padding": 0}.items()}
    return {f"tokenizer.ggml.{key}": value for key, value in (texts | special).items()}


def write_file(path: Path, architecture: str, tensors: Mapping[str, Tensor], types: Mapping[str, str],
               settings: Mapping[str, Value] | None = None) -> Path:
    """Write a GGUF file of these settings besides its architecture, encoded by the package gguf."""
    new = [NewTensor(name, BY_NAME[types[name]], tuple(tensor.shape), [_encoded(tensor, types[name]).tobytes()])
           for name, tensor in tensors.items()]
    write(path, {"general.architecture": Value.of("string", architecture), **(settings or {})}, new)
    return path


def decode_(model: Any, recorded: GgufMap, types: Mapping[str, str]) -> Any:
    """Round a model's parameters to what a file of these types holds, in place; rows are encoded by themselves."""
    for name, tensor in own_tensors(model).items():
        rule = recorded.rule(name)
        assert rule is not None, name
        own = [types.get(source, "F32") for source in rule.sources]
        if rule.rows == LATENT:
            keys, values = (_rounded(part, type) for part, type in zip(latent_parts(model.config, tensor), own, strict=True))
            tensor.copy_(torch.cat([keys.transpose(1, 2), values], 1).view(tensor.shape))
        elif own[0] != "F32":
            target = tensor.transpose(-1, -2) if rule.transposed else tensor
            target.copy_(_rounded(rows_of(tensor, rule), own[0]).reshape(target.shape))
    return model


def _rounded(tensor: Tensor, type: str) -> Tensor:
    """The numbers of a tensor in a type, of which the last axis is encoded."""
    encoded = _encoded(tensor, type)
    decoded = encoded.astype("float32") if type in WEIGHTLESS else quants.dequantize(encoded, GGMLQuantizationType[type])
    return torch.from_numpy(decoded.copy()).reshape(tensor.shape)


def written(folder: Path, model_type: str, size: int = 1, type: str = "Q8_0", has_settings: bool = False,
            has_vocabulary: bool = False, more: Mapping[str, Value] | None = None, **changes: Any) -> tuple[Path, Any]:
    """A GGUF file of a tiny model in a folder with its config; and the model, with the numbers that the file holds.

    type: of its matrices, or several, as 'Q4_0 F16', which they have in turn.  more: of the file's metadata.
    """
    model = tiny_model(model_type, size, **changes)
    recorded = GgufMap.read(MAPS / f"{model_type}.json")
    model.config.save_pretrained(folder)
    types = types_of(model, recorded, *type.split())
    settings = settings_of(model.config, recorded.architecture) if has_settings else {}
    settings |= (vocabulary(model.config.vocab_size) if has_vocabulary else {}) | dict(more or {})
    path = write_file(folder / "model.gguf", recorded.architecture, file_tensors(model, recorded), types, settings)
    return path, decode_(model, recorded, types)


def _encoded(tensor: Tensor, type: str) -> Any:
    array = tensor.detach().contiguous().float().numpy()
    if type in WEIGHTLESS:                                       # whole numbers, of weights that are less than 1
        return (array * 500).round().astype(TORCH[type])
    return quants.quantize(array, GGMLQuantizationType[type]) if math.prod(array.shape) else array


def logits(model: Any, vocabulary: int) -> Tensor:
    """What a model predicts for two sequences of 20 tokens."""
    ids = torch.randint(3, vocabulary, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        result: Tensor = model(ids).logits
    return result
