"""What the formats that ship say of checkpoints: their storages' tensors and their rules for detection, without torch."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import qdsl.generated
from qdsl.core.shapes import axis
from qdsl.core.stored import Description, Stored


@cache
def descriptions() -> tuple[Description, ...]:
    """All formats that ship, in the order of their names."""
    paths = {path.stem: path for folder in qdsl.generated.__path__ for path in Path(folder).glob("*.json")}
    return tuple(described(json.loads(paths[name].read_text())) for name in sorted(paths))


def described(data: dict[str, Any]) -> Description:
    """A description from what `qdsl build` wrote."""
    variants = {tuple(variant["key"]): {name: {key: _stored(each) for key, each in storage["tensors"].items()}
                                        for name, storage in variant["storages"].items()} for variant in data["variants"]}
    params = {name: tuple(values) for name, values in data["params"].items()}
    return Description(data["format"], params, data["sizes"], tuple(data["by"]), variants, data["detect"],
                       {name: tuple(values) for name, values in data.get("tables", {}).items()},
                       {tuple(variant["key"]): {name: tuple(map(axis, axes)) for name, axes in variant["fields"].items()}
                        for variant in data["variants"] if "fields" in variant},
                       frozenset(tuple(variant["key"]) for variant in data["variants"] if variant.get("planar")))


def _stored(data: dict[str, Any]) -> Stored:
    return Stored(data["dtype"], *data["axes"], aliases=data.get("aliases", ()), optional=data.get("optional", ""),
                  padding=data.get("padding", 0), seen=data.get("seen", ()))
