"""What settings mean for a format, by the rules that its spec lists under `detect`.

Settings are those of a checkpoint's config, or numbers in small tensors beside a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reading:
    """What a rule that holds says: the storage, '' where it leaves that open, and what settings give names of parameters.

    keys: the setting that gave each; values may be any that a config has, also such as the format does not know.
    weak: the rule took the absence of a setting for one of its words.
    """

    storage: str
    values: Mapping[str, Any]
    keys: Mapping[str, str]
    weak: bool = False


def readings(rules: object, names: Sequence[str], settings: Mapping[str, Any]) -> Iterator[Reading]:
    """What each rule says whose words the settings have.

    rules: one mapping or a list of them.  names: what settings may give values, parameters and N and K.  In a rule a setting
    is a word that it must be, a list of words of which it must be one, 'null' if it must be absent, or names, which take its
    values; 'storage' says what the rule speaks of.  What follows from a tensor, a mapping, says nothing here.
    """
    for rule in rules if isinstance(rules, list) else [rules] if isinstance(rules, dict) else []:
        reading = _reading(rule, names, settings)
        if reading is not None:
            yield reading


def _reading(rule: Mapping[str, Any], names: Sequence[str], settings: Mapping[str, Any]) -> Reading | None:
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    weak = False
    for key, wanted in rule.items():
        if key == "storage" or isinstance(wanted, Mapping):
            continue
        value = settings.get(key)
        words = wanted if isinstance(wanted, list) else [wanted]
        if any(same(value, word) for word in words):
            weak |= value is None and len(words) > 1
            continue
        if not all(word in names for word in words):
            return None
        many = value if isinstance(value, list) else [value]
        if value is None or len(many) != len(words):
            return None
        values |= dict(zip(words, many, strict=True))
        keys |= dict.fromkeys(words, key)
    return Reading(str(rule.get("storage", "")), values, keys, weak)


def from_tensors(rules: Mapping[str, Any], names: Sequence[str], contents: Mapping[str, Any]) -> dict[str, Any] | None:
    """What small tensors beside a weight give parameters, N and K; None where one of them is of another format.

    rules: by the tensors' names; a mapping is for a tensor that holds JSON.  contents: of those that are there, JSON or numbers.
    """
    found: dict[str, Any] = {}
    for key, rule in rules.items():
        if key in contents:
            content = contents[key]
            settings = content if isinstance(rule, Mapping) else {key: content}
            reading = _reading(rule if isinstance(rule, Mapping) else {key: rule}, names, settings)
            if reading is None or not isinstance(settings, Mapping):
                return None
            found |= reading.values
    return found


def same(value: object, word: object) -> bool:
    """Whether a setting is a rule's word; in letters of either case, which producers mix."""
    if word == "null" or value is None:
        return word == "null" and value is None
    if isinstance(value, str) and isinstance(word, str):
        return value.lower() == word.lower()
    return type(value) is type(word) and value == word
