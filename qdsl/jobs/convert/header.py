"""What the metadata of headers say of a checkpoint's weights, in another storage: by the rules for them on the format's page.

A page says it under `with` where no rule reads it.  Producers of such metadata list all weights there, plain ones too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.header_claims import LAYERS, PREFIX, Stated
from qdsl.checkpoint.detect.layers import Layer
from qdsl.checkpoint.detect.quantization import METADATA
from qdsl.checkpoint.detect.rules import SPOKEN, is_block
from qdsl.core.shapes import seen_shape
from qdsl.core.stored import Description, Stored

LIST = "tensor_names"                                            # the key of the list of all weights
PLAIN = json.dumps({"_type": "Tensor"})                          # what stands under the name of one that is not quantized
FLAT = ("Int4PlainInt32Tensor", "Int4TilePackedTo4dTensor")      # types that torchao has for weights of two axes alone
TENSORS = "tensors"                                              # in a rule: the names that a storage's tensors have there


def rule(format: str, storage: str, params: Mapping[str, int | str]) -> Mapping[str, Any] | None:
    """The rule by which a header says a weight; None where no page says all that one must say."""
    rules = next(each for each in descriptions() if each.name == format).detect.get("header", [])
    return next((each for each in rules if "with" in each and each.get("storage") == storage
                 and each.get("where", {}).items() <= params.items()), None)


def seen(format: str, storage: str, name: str, layer_shape: tuple[int, int], params: Mapping[str, int | str],
         shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that files give a tensor of a weight [N, K]; None where it is `shape`, that of its axes."""
    stored = _stored(format, storage, name)
    if stored is None or not stored.seen:
        return None
    page = next(each for each in descriptions() if each.name == format)
    return seen_shape(stored.seen, *layer_shape, page.numbers(params, layer_shape), prod(shape))


def called(layer: Layer, format: str, storage: str, name: str) -> str:
    """What a tensor of a storage is called where a header says the layer's weight."""
    stored = _stored(format, storage, name)
    leaf = next((alias for alias in stored.aliases if alias.startswith(PREFIX)), name) if stored else name
    module, _, own = weight(layer).rpartition(".")
    return f"{module}._{own}_{leaf.removeprefix(PREFIX)}".lstrip(".")


def unsaid(layer: Layer, format: str, storage: str, params: Mapping[str, int | str], tensors: Sequence[str]) -> str:
    """Why a header cannot say the weights of experts in one tensor; '' where it can, and for a layer without experts."""
    found = rule(format, storage, params)
    if layer.experts is None or found is None:
        return ""
    if found["_type"] in FLAT:
        return f"torchao has no {found['_type']} of experts in one tensor"
    stored = {name: _stored(format, storage, name) for name in tensors}
    if any(each is not None and each.seen for each in stored.values()):
        return "torchao has no scales of experts in tiles"
    single = next((name for name, each in stored.items() if each is not None and not each.axes), None)
    return f"'{single}' is one number for all experts there" if single else ""


def _stored(format: str, storage: str, name: str) -> Stored | None:
    """A tensor of a storage; None for one that is beside it."""
    variants = next(each for each in descriptions() if each.name == format).variants
    return next(storages[storage].get(name) for storages in variants.values() if storage in storages)


def said(layer: Layer, format: str, storage: str, params: Mapping[str, int | str], tensors: Sequence[str]) -> str | None:
    """The JSON for a layer's weight in a storage; None where no page says how.  tensors: their names there."""
    found = rule(format, storage, params)
    if found is None:
        return None
    page = next(each for each in descriptions() if each.name == format)
    values = _values(page, params, layer.shape)
    made = _written(found["with"], {TENSORS: sorted(tensors)})
    for key, wanted in found.items():
        if key not in SPOKEN:
            words = wanted if isinstance(wanted, list) and any(word in values for word in wanted) else None
            front = [] if words is None or layer.experts is None else [1 if is_block(key) else layer.experts]
            place = made
            *path, last = key.split(".")
            for part in path:
                place = place.setdefault(part, {})
            place[last] = _written(wanted[0] if words is None and isinstance(wanted, list) else
                                   front + wanted if front else wanted, values)
    return json.dumps(made)


def _values(format: Description, params: Mapping[str, int | str], shape: tuple[int, int]) -> dict[str, Any]:
    return {**params, **format.numbers(params, shape), "N": shape[0], "K": shape[1]}


def _written(word: Any, values: Mapping[str, Any]) -> Any:
    """A page's words as JSON has them; names of parameters, N and K become their values."""
    if isinstance(word, Mapping):
        return {key: _written(each, values) for key, each in word.items()}
    if isinstance(word, list):
        return [_written(each, values) for each in word]
    return None if word == "null" else values.get(word, word) if isinstance(word, str) else word


def weight(layer: Layer) -> str:
    """The name of a layer's weight."""
    return layer.name if layer.stacked else f"{layer.name}.weight".lstrip(".")


def texts(stated: Stated, changed: Mapping[str, str | None], kept: Sequence[Layer], plain: Sequence[str]) -> dict[str, str]:
    """What metadata are to say of weights, in every file of a checkpoint; nothing where nothing is to be said of a quantized one.

    changed: by the weights that change, what is to be said of each.  kept: layers that stay.  plain: all other tensors.
    """
    found = {name: text for name, text in changed.items() if text is not None}
    found |= {name: stated.text(name) for layer in kept if (name := stated.name(layer.name)) is not None}
    if found:
        found |= {name: PLAIN for name in plain if "." in name}  # what is in no module cannot be listed
        found[LIST] = json.dumps([*found])
    return found


def renewed(old: Mapping[str, str], new: Mapping[str, str], changed: Sequence[str], plain: Sequence[str]) -> dict[str, str]:
    """A file's metadata with what is now to be said of weights in place of what was.  changed: names that weights have had."""
    gone = {LIST, *changed, *(name for name in plain if "." in name), *((METADATA, LAYERS) if changed else ())}
    return {**{key: text for key, text in old.items() if key not in gone}, **new}
