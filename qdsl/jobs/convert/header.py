"""Writes the metadata about weights in safetensors headers for another storage, by the rules of its producer.

Settings that no reader checks are under `with` in a rule.  Producers of such metadata list all weights, including plain ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from qdsl.checkpoint.detect.descriptions import description_of
from qdsl.checkpoint.detect.header_claims import PREFIX, HeaderClaims
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.detect.quantization import METADATA
from qdsl.checkpoint.detect.rules import is_block
from qdsl.core.producer import ABOUT_RULE
from qdsl.core.shapes import shape_in_files
from qdsl.core.stored import Stored

TENSORS = "tensors"                                              # key of a rule: the names of a storage's tensors in headers


def rule(format: str, storage: str, params: Mapping[str, int | str]) -> Mapping[str, Any] | None:
    """The rule that describes a weight in a header; None if no rule describes all required settings."""
    rules = description_of(format).detect.get("header", [])
    return next((candidate for candidate in rules if "with" in candidate and candidate.get("storage") == storage
                 and candidate.get("where", {}).items() <= params.items()), None)


def file_shape(format: str, storage: str, name: str, layer_shape: tuple[int, int], params: Mapping[str, int | str],
         shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of a tensor in files for a weight [N, K]; None if it is `shape`, that of its axes."""
    stored = stored_tensor(format, storage, name)
    if stored is None or not stored.seen:
        return None
    spec = description_of(format)
    return shape_in_files(stored.seen, *layer_shape, spec.sizes_for(params, layer_shape), prod(shape))


def tensor_name(layer: Layer, format: str, storage: str, name: str) -> str:
    """The name of a storage's tensor if a header describes the layer's weight."""
    stored = stored_tensor(format, storage, name)
    leaf = next((alias for alias in stored.aliases if alias.startswith(PREFIX)), name) if stored else name
    module, _, own = weight(layer).rpartition(".")
    return f"{module}._{own}_{leaf.removeprefix(PREFIX)}".lstrip(".")


def why_unwritable(layer: Layer, format: str, storage: str, params: Mapping[str, int | str], tensors: Sequence[str]) -> str:
    """Why a header cannot describe the weights of experts in one tensor; '' if it can, and for a layer without experts."""
    header_rule = rule(format, storage, params)
    if layer.experts is None or header_rule is None:
        return ""
    if not header_rule.get("experts", True):
        return f"{header_rule['producer']} has no {header_rule['_type']} of experts in one tensor"
    stored = {name: stored_tensor(format, storage, name) for name in tensors}
    if any(tensor is not None and tensor.seen for tensor in stored.values()):
        return f"{header_rule['producer']} has no scales of experts in tiles"
    single = next((name for name, tensor in stored.items() if tensor is not None and not tensor.axes), None)
    return f"'{single}' is one number for all experts there" if single else ""


def stored_tensor(format: str, storage: str, name: str) -> Stored | None:
    """A tensor of a storage; None for one outside of it."""
    variants = description_of(format).variants
    return next(storages[storage].get(name) for storages in variants.values() if storage in storages)


def weight_json(layer: Layer, format: str, storage: str, params: Mapping[str, int | str], tensors: Sequence[str]) -> str | None:
    """The JSON for a layer's weight in a storage; None if no rule describes it.  tensors: their names in the file."""
    header_rule = rule(format, storage, params)
    if header_rule is None:
        return None
    spec = description_of(format)
    values = {**params, **spec.sizes_for(params, layer.shape), "N": layer.shape[0], "K": layer.shape[1]}
    settings = _written(header_rule["with"], {TENSORS: sorted(tensors)})
    for key, wanted in header_rule.items():
        if key not in ABOUT_RULE:
            words = wanted if isinstance(wanted, list) and any(word in values for word in wanted) else None
            front = [] if words is None or layer.experts is None else [1 if is_block(key) else layer.experts]
            place = settings
            *path, last = key.split(".")
            for part in path:
                place = place.setdefault(part, {})
            place[last] = _written(wanted[0] if words is None and isinstance(wanted, list) else
                                   front + wanted if front else wanted, values)
    return json.dumps(settings)


def _written(word: Any, values: Mapping[str, Any]) -> Any:
    """A value of a spec for JSON; names of parameters, N and K become their values."""
    if isinstance(word, Mapping):
        return {key: _written(part, values) for key, part in word.items()}
    if isinstance(word, list):
        return [_written(part, values) for part in word]
    return None if word == "null" else values.get(word, word) if isinstance(word, str) else word


def weight(layer: Layer) -> str:
    return layer.name if layer.stacked else f"{layer.name}.weight".lstrip(".")


def texts(claims: HeaderClaims, changed: Mapping[str, str | None], kept: Sequence[Layer], plain: Sequence[str]) -> dict[str, str]:
    """The metadata about weights for every file of a checkpoint; empty if no quantized weight needs any.

    changed: the new text per changed weight, or None.  kept: unchanged layers.  plain: all other tensors.
    """
    metadata = {name: text for name, text in changed.items() if text is not None}
    metadata |= {name: claims.text(name) for layer in kept if (name := claims.name(layer.name)) is not None}
    for header in producers().headers if metadata else []:
        if header.weights:
            # A tensor without a module cannot be listed.
            metadata |= {name: json.dumps(header.plain) for name in plain if "." in name}
            metadata[header.weights] = json.dumps([*metadata])
    return metadata


def renew_metadata(old: Mapping[str, str], new: Mapping[str, str], changed: Sequence[str], plain: Sequence[str],
                   ) -> dict[str, str]:
    """A file's metadata with old texts about weights replaced by new ones.  changed: old names of weights."""
    headers = producers().headers
    gone = {*(header.weights for header in headers), *changed, *(name for name in plain if "." in name),
            *((METADATA, *(header.layers for header in headers)) if changed else ())}
    return {**{key: text for key, text in old.items() if key not in gone}, **new}
