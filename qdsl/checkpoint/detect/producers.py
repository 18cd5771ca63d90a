"""The known producers, and the meaning of their configs' keys: specs/producers as compiled by `qdsl build`, without torch.

The environment variable QDSL_PRODUCERS names a folder with YAML files of further producers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import qdsl.generated
from qdsl.core.producer import (
    CONFIG_FILE,
    INLINE,
    GroupSettings,
    Header,
    LayerSettings,
    PatternSettings,
    Producer,
    Rule,
    SettingsPlace,
    producer_of,
    read_yaml,
)

FOLDER_VARIABLE = "QDSL_PRODUCERS"
# Places of transformers' settings, of models and of nested language models; the settings name their producer.
COMMON_PLACES = (SettingsPlace(CONFIG_FILE, ("quantization_config",)),
                 SettingsPlace(CONFIG_FILE, ("text_config", "quantization_config")),
                 SettingsPlace(CONFIG_FILE, ("llm_config", "quantization_config")))
Meaning = TypeVar("Meaning")


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """The meaning of the keys of one producer's settings: by its own file, else by the first file that has the key.

    skipped: lists of unquantized layers, and their dialects.  layers: maps from layers to settings.  patterns: maps from patterns
    to settings.  only: lists of the only quantized layers.  groups: settings of groups of layers.
    """

    skipped: Mapping[str, Sequence[str]]
    layers: Mapping[str, LayerSettings]
    patterns: Mapping[str, PatternSettings]
    only: Mapping[str, str]
    groups: Mapping[str, GroupSettings]


class Producers:
    """All producers.  If files disagree on a key that a config's own producer does not mention, the first one counts."""

    def __init__(self, shipped: Sequence[Producer], further: Sequence[Producer] = ()) -> None:
        every = [*shipped, *further]
        self.every = tuple(every)
        self._further = {producer.name for producer in further}
        self._by_method = {method: producer for producer in every for method in producer.methods}
        self._by_method |= {producer.name.lower(): producer for producer in every}
        self._keys: dict[str, ConfigKeys] = {}
        own = [(place, producer.name) for producer in every for place in producer.places]
        self.places = [*(pair for pair in own if pair[0].first), *((place, "") for place in COMMON_PLACES),
                       *(pair for pair in own if not pair[0].first)]
        self.headers: list[Header] = [producer.header for producer in every if producer.header is not None]

    def of(self, method: object) -> Producer:
        """The producer of a quant_method; an empty one for an unknown quant_method."""
        return self._by_method.get(str(method).lower()) or Producer(str(method).lower())

    def is_known(self, method: str) -> bool:
        """Whether some producer's settings have this quant_method."""
        return method in self._by_method

    def unnamed(self, settings: Mapping[str, Any]) -> str:
        """The producer whose settings have no quant_method; '' for unknown ones."""
        named = [(len(keys), producer.name) for producer in self.every for keys in producer.unnamed
                 if all(settings.get(key) not in (None, False) for key in keys)]
        return max(named, key=lambda own: own[0], default=(0, ""))[1]

    def keys(self, method: str) -> ConfigKeys:
        """The meaning of settings' keys under this quant_method."""
        if method not in self._keys:
            own = self.of(method)
            every = [own, *self.every]
            self._keys[method] = ConfigKeys(
                _first(every, lambda producer: producer.skipped),
                _first(every, lambda producer: {key: how for key, how in producer.layers.items()
                                                if key != INLINE or producer is own}),
                _first(every, lambda producer: producer.patterns), _first(every, lambda producer: producer.only),
                _first(every, lambda producer: {} if producer.groups is None else {producer.groups.key: producer.groups}))
        return self._keys[method]

    def rules(self, format: str) -> dict[str, list[Rule]]:
        """The rules for a format: 'config' for settings, 'header' for JSON of headers.

        Settings of a storage are written by its first rule.  Preferred rules of further producers come first, their other rules
        last.
        """
        config = [{"quant_method": producer.name, **rule} for producer in self.every for rule in producer.formats.get(format, ())]
        header = [{"producer": producer.name, **rule} for producer in self.every for rule in producer.headers.get(format, ())]
        config.sort(key=lambda rule: self._rank(rule["quant_method"], rule.pop("preferred", False)))
        return ({"config": config} if config else {}) | ({"header": header} if header else {})

    def _rank(self, name: str, is_preferred: bool) -> int:
        return (1, 0)[name in self._further] if is_preferred else (2, 3)[name in self._further]

    def tensor_name(self, method: str, format: str, storage: str, tensor: str) -> str:
        """A producer's own name for a tensor of a storage; '' if it has none."""
        return self.of(method).tensors.get(format, {}).get(storage, {}).get(tensor, "")

    def tensor_names(self, format: str) -> set[str]:
        """All producers' own names for tensors of a format."""
        return {name for producer in self.every for storage in producer.tensors.get(format, {}).values()
                for name in storage.values()}


def _first(every: Sequence[Producer], meaning: Callable[[Producer], Mapping[str, Meaning]]) -> dict[str, Meaning]:
    """The meaning of each key, from the first producer that has it."""
    keys: dict[str, Meaning] = {}
    for producer in every:
        for key, how in meaning(producer).items():
            keys.setdefault(key, how)
    return keys


def producers() -> Producers:
    """The shipped producers by name, and those of the folder that QDSL_PRODUCERS names.

    Raises ProducerError for an invalid file of that folder.
    """
    return _read(os.environ.get(FOLDER_VARIABLE, ""))


@cache
def _read(folder: str) -> Producers:
    shipped = [path for root in qdsl.generated.__path__ for path in (Path(root) / "producers").glob("*.json")]
    every = {path.stem: producer_of(json.loads(path.read_text()), str(path)) for path in shipped}
    further = sorted(Path(folder).glob("*.yaml")) if folder else []
    return Producers([every[name] for name in sorted(every)], [producer_of(read_yaml(path), str(path)) for path in further])
