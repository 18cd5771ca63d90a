"""The shipped formats: the tensors of their storages, and all producers' rules for them, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import qdsl.generated
from qdsl.checkpoint.detect.producers import Producers, producers
from qdsl.core.producer import Producer, check
from qdsl.core.shapes import axis, listed
from qdsl.core.stored import Description, Stored

Variants = Mapping[tuple[int | str, ...], Mapping[str, Mapping[str, Stored]]]


def descriptions() -> tuple[Description, ...]:
    """All shipped formats by name, with the rules of all producers.

    Raises ProducerError if a producer in QDSL_PRODUCERS names unknown formats or tensors.
    """
    return _with_producers(producers())


@cache
def _shipped() -> tuple[Description, ...]:
    """The formats without producers' rules."""
    paths = {path.stem: path for folder in qdsl.generated.__path__ for path in Path(folder).glob("*.json")}
    return tuple(described(json.loads(paths[name].read_text())) for name in sorted(paths))


@cache
def _with_producers(registry: Producers) -> tuple[Description, ...]:
    for producer in registry.every:
        check(producer, _shipped())
    return tuple(replace(format, detect={**registry.rules(format.name), **format.detect},
                         variants=_renamed(format, registry.every)) for format in _shipped())


def _renamed(format: Description, every: Sequence[Producer]) -> Variants:
    """The variants of a format with producers' tensor names as additional aliases."""
    names = [producer.tensors[format.name] for producer in every if format.name in producer.tensors]
    if not names:
        return format.variants

    def aliases(storage: str, tensor: str) -> list[str]:
        return [own[storage][tensor] for own in names if tensor in own.get(storage, {})]

    return {key: {storage: {tensor: stored.called(aliases(storage, tensor)) for tensor, stored in layout.items()}
                  for storage, layout in storages.items()} for key, storages in format.variants.items()}


def described(data: dict[str, Any]) -> Description:
    """A description from the JSON that `qdsl build` wrote."""
    variants = {tuple(variant["key"]): {name: {key: _stored(tensor) for key, tensor in storage["tensors"].items()}
                                        for name, storage in variant["storages"].items()} for variant in data["variants"]}
    params = {name: listed(values) for name, values in data["params"].items()}
    return Description(data["format"], params, data["sizes"], tuple(data["by"]), variants, data["detect"],
                       {name: tuple(values) for name, values in data.get("tables", {}).items()},
                       {tuple(variant["key"]): {name: tuple(map(axis, axes)) for name, axes in variant["fields"].items()}
                        for variant in data["variants"] if "fields" in variant},
                       frozenset(tuple(variant["key"]) for variant in data["variants"] if variant.get("planar")),
                       data.get("fixed", {}), tuple(name for name in data.get("summary", {}).get("storages", ())
                                                    if not any(name in storages for storages in variants.values())))


def _stored(data: dict[str, Any]) -> Stored:
    return Stored(data["dtype"], *data["axes"], aliases=data.get("aliases", ()), optional=data.get("optional", ""),
                  padding=data.get("padding", 0), seen=data.get("seen", ()), within=data.get("within", ""))
