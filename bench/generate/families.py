"""A Llama of half a billion random weights in each family of formats, beside itself in dense bfloat16.

Layers but the head are packed; the head too where files of the family have it so.  The embedding is dense.  Weights repeat a
tile of random rows, each in memory of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from bench.generate.figures import Model, Ratio
from bench.generate.sides import EagerModel

HIDDEN, INNER, HEADS, GROUPS, VOCABULARY, LAYERS = 1280, 3584, 20, 4, 32000, 24
TILE = 128                                                       # random rows
DENSE = "dense bfloat16"


@dataclass(frozen=True, slots=True)
class Family:
    """How a family stores layers, and the head, None if it is dense.  tokens: of an answer that is timed."""

    format: str
    params: Mapping[str, Any] = field(default_factory=dict)
    head: str | None = None
    tokens: int = 8


FAMILIES: Mapping[str, Family] = {
    "GPTQ": Family("int_group", {"bits": 4, "storage": "gptq_v2"}),
    "AWQ": Family("int_group", {"bits": 4, "storage": "awq"}),
    "FP8 per row": Family("fp8_channel"),
    "FP8 in blocks": Family("fp8_block"),
    "INT8": Family("int8_channel"),
    "NF4": Family("nf4"),
    "MXFP4": Family("ocp_mxfp4"),
    "NVFP4": Family("nvfp4_ct"),
    "Q4_0": Family("q4_0", head="q6_k"),
    "Q8_0": Family("q8_0", head="q8_0"),
    "Q4_K": Family("q4_k", head="q6_k"),
    "Q6_K": Family("q6_k", head="q6_k"),
    "IQ4_XS": Family("iq4_xs", head="q6_k"),
    "IQ3_S": Family("iq3_s", head="q6_k"),
    "IQ2_XXS": Family("iq2_xxs", head="q6_k"),
    "IQ1_S": Family("iq1_s", head="q6_k"),
    "DF11": Family("df11", tokens=2),
    "hlane": Family("hlane", tokens=2),
    "fix4": Family("fix4", tokens=2),
}


def model_of(name: str) -> Model:
    """What is measured of a family.  The goal is the speed of dense bfloat16 on two threads."""
    return Model(f"Llama 0.5 B, {name}", FAMILIES[name].tokens, (128,), (Ratio(name, DENSE, {("decode", 2): 1.0}),), None, 1.0)


def layers_path(count: int) -> Path:
    """Where a side finds how many layers its model has: it reads no file."""
    return Path(f"{count} layers")


class Synthetic(EagerModel):
    """The model of a family, or the dense one, in transformers' eager loop."""

    def __init__(self, name: str, path: Path) -> None:
        model = _dense_model(int(path.name.split()[0]))
        if name != DENSE:
            _pack(model, FAMILIES[name])
        super().__init__(model, {"dtype": "bfloat16", "bytes": str(sum(own.nbytes for own in model.parameters()))})


def _dense_model(layers: int) -> Any:
    """A Llama in bfloat16 whose matrices repeat random numbers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=layers, num_attention_heads=HEADS,
                         num_key_value_heads=GROUPS, vocab_size=VOCABULARY, tie_word_embeddings=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() == 1:
            parameter.fill_(1)
        else:
            tile = _tile(parameter.shape[1])
            parameter.view(-1, *tile.shape).copy_(tile)
    return model


@cache
def _tile(k: int) -> Any:
    import torch

    return torch.randn(TILE, k, generator=torch.Generator().manual_seed(k)).mul_(k ** -0.5).to(torch.bfloat16)


def _pack(model: Any, family: Family) -> None:
    """Replace the layers of a model by packed ones, as loaders place them."""
    import torch

    from qdsl.runtime.torch.siblings import make_ready

    by_shape: dict[tuple[str, int, int], Any] = {}
    for name, module in list(model.named_modules()):
        format = family.head if name == "lm_head" else family.format
        if isinstance(module, torch.nn.Linear) and format is not None:
            n, k = module.weight.shape
            if (format, n, k) not in by_shape:
                by_shape[format, n, k] = _packed(format, {} if name == "lm_head" else family.params, n, k)
            packed = by_shape[format, n, k]
            model.set_submodule(name, packed.format.Linear(packed.apply(torch.clone), None, torch.bfloat16))
    by_shape.clear()
    make_ready(model, lambda name: True)


def _packed(format: str, params: Mapping[str, Any], n: int, k: int) -> Any:
    """A weight [N, K] of repeated rows."""
    import qdsl
    from qdsl.runtime import FormatError, PackedWeight

    own, tile = qdsl.load(format).FORMAT, _tile(k)
    try:
        return PackedWeight.join([own.quantize(tile, **params)] * (n // TILE))
    except FormatError:                                          # rows share something
        return own.quantize(tile.repeat(n // TILE, 1), **params)

