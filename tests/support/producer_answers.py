"""Answers of producers' programs: a layer of a checkpoint, the settings, and what the program computes with it.

tests/support/producer_programs.py records them in tests/data/programs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qdsl.checkpoint.files.safetensors import write
from tests.support.paths import ROOT

DATA = ROOT / "tests" / "data" / "programs"
SIZE = 128                                                       # features of the layer, in and out
CALIBRATED = 0.05                                                # x times this lies where the model's own inputs of the layer do
LAYER = "model.layers.0.self_attn.o_proj"
OTHER = "model.layers.0.mlp.up_proj"


@dataclass(frozen=True)
class Answer:
    """A layer [SIZE, SIZE] with a bias in a producer's checkpoint, and what the producer's program computes with it.

    key, value: the setting that is not its default, '' for none.  settings: what config.json has then.  tensors: the layer's, by
    their names.  y: the program's result for x times `scale`, None where it refuses the checkpoint: `error` says how.
    """

    producer: str
    key: str
    value: Any
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    y: Tensor | None
    error: str = ""
    scale: float = 1.0
    package: str = field(default="", compare=False)


def x() -> Tensor:
    """The input [4, SIZE] of all layers."""
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(7), dtype=torch.float32)


def set_key(settings: Any, path: str, value: Any) -> Any:
    """Settings with one of another value; dots lead into objects."""
    key, _, inner = path.partition(".")
    return {**settings, key: set_key(settings.get(key) or {}, inner, value) if inner else value}


def record(producer: str, answers: Iterable[Answer]) -> None:
    """Write the answers of a producer."""
    pool: dict[str, Tensor] = {}
    data = []
    for one in answers:
        print(one.producer, one.key, one.value, one.error, flush=True)
        data.append({"producer": one.producer, "package": one.package, "key": one.key, "value": one.value, "error": one.error,
                     "scale": one.scale, "settings": one.settings,
                     "tensors": {name: _pooled(own, pool) for name, own in one.tensors.items()},
                     "y": None if one.y is None else _pooled(one.y, pool)})
    short(data)
    DATA.mkdir(exist_ok=True)
    write(DATA / f"{producer}.safetensors", pool)
    (DATA / f"{producer}.json").write_text("[\n" + ",\n".join(json.dumps(one) for one in data) + "\n]\n")


def short(data: list[dict[str, Any]]) -> None:
    """Leave out settings that are the first ones of their producer with one key changed."""
    bases = {one["producer"]: one for one in data if not one["key"]}
    for one in data:
        base = bases.get(one["producer"], one)
        if one is not base and one["settings"] == set_key(base["settings"], one["key"], one["value"]):
            one["settings"] = None
        if one is not base and one["tensors"] == base["tensors"]:
            one["tensors"] = None


def _pooled(tensor: Tensor, pool: dict[str, Tensor]) -> str:
    """The name of a tensor in the pool, where equal ones are once."""
    tensor = tensor.detach().contiguous().clone()
    own = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    key = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + own).hexdigest()[:16]
    pool[key] = tensor
    return key


@cache
def recorded() -> list[Answer]:
    """The recorded answers."""
    from safetensors.torch import load_file

    every = []
    for file in sorted(DATA.glob("*.json")):
        pool, data = load_file(file.with_suffix(".safetensors")), json.loads(file.read_text())
        bases = {one["producer"]: one for one in data if not one["key"]}
        for one in data:
            base = bases.get(one["producer"], one)
            one["settings"] = set_key(base["settings"], one["key"], one["value"]) if one["settings"] is None else one["settings"]
            one["tensors"] = base["tensors"] if one["tensors"] is None else one["tensors"]
        every += [Answer(**{**one, "tensors": {name: pool[own] for name, own in one["tensors"].items()},
                            "y": None if one["y"] is None else pool[one["y"]]}) for one in data]
    return every
