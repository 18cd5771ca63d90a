"""Settings that contradict tensors in what numbers depend on: every rule of every producer, each of its settings changed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.layer import Layers
from qdsl.checkpoint.detect.layers import detected_layers
from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.detect.rules import OWN
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.core.producer import ABOUT_RULE
from qdsl.runtime import PackedWeight
from tests.support import formats, producer_folders
from tests.support.formats import Case
from tests.support.paths import ROOT

LEAST = 320                                                      # rows and columns, so that blocks are several
# Settings that may deny what tensors are, and why no number depends on that.
INERT = {
    "desc_act": "an index of columns that is stored is used, and columns may come out in order",
    "actorder": "the same",
    "sym": "asymmetric codes may come out with symmetric zero points",
    "zero_point": "the same",
    "activation_scheme": "it says how a producer quantizes x, which qdsl does not",
}


def rules() -> list[tuple[str, str, int]]:
    """All rules that decide a weight: the producer, the format, and the number of the rule.  Headers decide torchao's."""
    return [(producer.name, format, number) for producer in producers().every if not producer.headers
            for format, own in producer.formats.items() for number in range(len(own))]


def weight_of(format: str, rule: Mapping[str, Any]) -> PackedWeight:
    """A weight of random fields that a rule speaks of."""
    described = next(description for description in descriptions() if description.name == format)
    key, storage = next((key, storage) for key, storages in described.variants.items() for storage in storages
                        if storage == rule.get("storage", storage))
    params = {name: values[0] for name, values in described.params.items()} | dict(zip(described.by, key, strict=True))
    params |= rule.get("where", {})
    case = Case(ROOT / "specs" / f"{format}.yaml", storage, tuple(params.items()))
    n, k = formats.smallest(case, 1, params)
    shape = formats.fixed_shape(case, (n * -(-LEAST // n), k * -(-LEAST // k)))
    packed: PackedWeight = case.module.pack(formats.random_fields(case, shape, params=params), storage=case.storage, **params)
    return packed


def settings_of(producer: str, rule: Mapping[str, Any], packed: PackedWeight) -> dict[str, Any]:
    """Flat settings that are true of a weight; dots stand for nesting."""
    settings: dict[str, Any] = {"quant_method": producer}
    for key, wanted in {**rule, **rule.get("fixed", {})}.items():
        if key in ABOUT_RULE:
            continue
        if isinstance(wanted, Mapping):
            [(source, (stored, missing))] = wanted.items()
            settings[key] = stored if source in packed.tensors or source in packed.variant.fields else missing
            continue
        words = wanted if isinstance(wanted, list) else [wanted]
        if all(word in packed.params for word in words) and key != "strategy":
            settings[key] = [packed.params[word] for word in words] if isinstance(wanted, list) else packed.params[wanted]
        elif words[-1] != "null":
            settings[key] = packed.params.get(words[-1], words[-1]) if isinstance(words[-1], str) else words[-1]
    return {key: None if value == "null" else value for key, value in settings.items()}


def others(value: Any, words: Collection[str]) -> Iterator[Any]:
    """Other values of a setting; words: those that rules of its producer have for it."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (2 * value, value // 2, value + 1) if value > 0 else (32, 64)
    elif isinstance(value, list):
        yield from ([other, *value[1:]] for other in others(value[0], ()))
    elif isinstance(value, str):
        yield from ("another", *sorted(words))


def alternatives(producer: str, rule: Mapping[str, Any], key: str) -> set[str]:
    """The words for a setting in other rules of a producer; alternatives in one rule mean the same."""
    def words(wanted: Any) -> set[str]:
        return {word for word in (wanted if isinstance(wanted, list) else [wanted]) if isinstance(word, str) and word != "null"}

    rules = [other for every in producers().of(producer).formats.values() for other in every]
    own = words({**rule, **rule.get("fixed", {})}.get(key))
    return set().union(*(words({**other, **other.get("fixed", {})}.get(key)) for other in rules)) - own


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with dots as settings within settings."""
    whole: dict[str, Any] = {}
    for key, value in settings.items():
        *heads, last = key.split(".")
        place = whole
        for head in heads:
            place = place.setdefault(head, {})
        place[last] = value
    return whole


def detected(path: Path, settings: Mapping[str, Any], shape: tuple[int, int] | None = None) -> Layers:
    """shape: of the layer, where tensors do not state it."""
    (path / "config.json").write_text(json.dumps({"quantization_config": nested(settings)}))
    with Folder(path) as folder:
        return detected_layers(folder, shapes=None if shape is None else {"model.up": shape})


@pytest.mark.parametrize(("producer", "format", "number"), rules())
def test_each_setting_of_each_producer(tmp_path: Path, producer: str, format: str, number: int) -> None:
    """True settings are never refused.  Changed ones are, unless the tensors fit what they say, or `INERT` says why not."""
    rule = producers().of(producer).formats[format][number]
    packed = weight_of(format, rule)
    write(tmp_path / "model.safetensors", producer_folders.named("model.up", packed))
    true = settings_of(producer, rule, packed)
    shape = packed.shape if format == "quanto" else None
    [layer] = detected(tmp_path, true, shape).layers
    assert (layer.format, layer.contradictions, layer.problems) == (format, (), ()), layer.why
    for key, value in true.items():
        for other in others(value, alternatives(producer, rule, key)):
            survey = detected(tmp_path, {**true, key: other}, shape)
            [changed] = survey.layers
            is_obeyed = (changed.format, changed.storage, changed.params) != (layer.format, layer.storage, layer.params)
            is_ours = key == "quant_method" and value == OWN     # whose tensors need no settings
            is_ours |= key == "num_bits" and "int-quantized" in rule.get("format", "")         # codes of fewer bits fill a byte
            texts = [*survey.contradictions, *changed.contradictions]
            assert texts or is_obeyed or is_ours or key in INERT, f"{key} = {other} in place of {value} is read"
            assert key == "quant_method" or not texts or is_obeyed or any(key in text for text in texts), texts
