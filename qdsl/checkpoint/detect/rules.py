"""Storage and parameters of a format from settings: the rules of producers, and those of its spec for small tensors.

Settings are those of a checkpoint's config, of a header's metadata, or numbers in small tensors beside a weight.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qdsl.core.producer import ABOUT_RULE
from qdsl.core.stored import Description

EXTENTS = ("N", "K")
EXPERTS = "E"                                                    # how many such weights there are, in front of N and K
OWN = "qdsl"                                                     # the quant_method of settings that are no producer's


@dataclass(frozen=True, slots=True)
class Reading:
    """The storage ('' if open) and the parameters that a matching rule decides.

    keys: the setting that gave each, none of those that the rule itself gives; values may be any that a config has, also such
    as the format does not know.
    weak: the rule took the absence of a setting for one of its words.
    follows: settings and what each follows from: a tensor or a field, and the words where that says something, and where not.
    constants: numbers that its producer writes beside, which a format has for good.
    fronts: what lists have in front of what the rule has, the extent of one more axis, of experts; None for those that have
    nothing there, by settings.
    """

    storage: str
    values: Mapping[str, Any]
    keys: Mapping[str, str]
    weak: bool = False
    fronts: Mapping[str, Any] = field(default_factory=dict)
    follows: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)


def own_rule(format: Description, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The rule for settings that qdsl writes where no producer has words for a storage; what they do not state is left open."""
    params = {name: name for name in format.params if name in settings}
    return {"quant_method": OWN, "format": [format.name, "null"], "storage": str(settings.get("storage", "")), **params}


def readings(rules: object, names: Sequence[str], settings: Mapping[str, Any], stacks: bool = False) -> Iterator[Reading]:
    """The readings of all rules that the settings match.

    rules: one mapping or a list of them.  names: what settings may give values, parameters and N and K.  In a rule a setting
    is a word that it must be, a list of words of which it must be one, 'null' if it must be absent, or names, which take its
    values, in a list beside words; dots lead to settings within settings.  'storage' and 'where', values of parameters, say what
    the rule speaks of.  What follows from a tensor, another mapping, decides nothing here, nor what stands under 'with'.  stacks:
    settings may be those of experts in one tensor.
    """
    for rule in rules if isinstance(rules, list) else [rules] if isinstance(rules, dict) else []:
        reading = _reading(rule, names, settings, stacks)
        if reading is not None:
            yield reading


def _reading(rule: Mapping[str, Any], names: Sequence[str], settings: Mapping[str, Any], stacks: bool = False) -> Reading | None:
    values: dict[str, Any] = dict(rule.get("where", {}))
    keys: dict[str, str] = {}
    fronts: dict[str, Any] = {}
    weak = False
    for key, wanted in rule.items():
        if key in ABOUT_RULE or isinstance(wanted, Mapping):
            continue
        value = at(settings, key)
        words = wanted if isinstance(wanted, list) else [wanted]
        if any(same(value, word) for word in words):
            weak |= value is None and len(words) > 1
            continue
        many = value if isinstance(value, list) else [value]
        if stacks and isinstance(value, list) and isinstance(wanted, list):
            more = len(many) == len(words) + 1
            fronts[key] = many[0] if more else None
            many = many[more:]
        if value is None or isinstance(value, list) != isinstance(wanted, list) or len(many) != len(words):
            return None
        if not all(word in names or same(entry, word) for word, entry in zip(words, many, strict=True)):
            return None
        own = {word: entry for word, entry in zip(words, many, strict=True) if word in names}
        values |= own
        keys |= dict.fromkeys(own, key)
    follows = {key: wanted for key, wanted in rule.items() if key not in ABOUT_RULE and isinstance(wanted, Mapping)}
    constants = {key: word for key, word in rule.get("with", {}).items() if type(word) is int}
    return Reading(str(rule.get("storage", "")), values, keys, weak, fronts, follows, constants)


def is_block(key: str) -> bool:
    """Whether a header's list is of the extents of a block, and not of those of the weight."""
    return key.endswith("block_size")


def at(settings: Mapping[str, Any], key: str) -> Any:
    """The setting of a name, or where its dots lead; None where there is none."""
    if key in settings:
        return settings[key]
    head, _, inner_key = key.partition(".")
    inner = settings.get(head)
    return at(inner, inner_key) if inner_key and isinstance(inner, Mapping) else None


def from_tensors(format: Description, contents: Mapping[str, Any]) -> dict[str, Any] | None:
    """What small tensors beside a weight give parameters, N and K, and tensors of one number; None for those of another format.

    E is how many experts there are, where a list of N and K has that in front.
    contents: of those that are there, JSON where the format's rule for a tensor is a mapping, else numbers.
    """
    names = [*format.params, *EXTENTS, *format.singles]
    values: dict[str, Any] = {}
    for key, rule in format.detect.get("tensors", {}).items():
        if key not in contents:
            continue
        content = contents[key]
        if isinstance(rule, str) and rule in format.tables:
            if content != list(format.tables[rule]):
                return None
            continue
        settings = content if isinstance(rule, Mapping) else {key: content}
        reading = _reading(rule if isinstance(rule, Mapping) else {key: rule}, names, settings, isinstance(rule, Mapping))
        if reading is None or not isinstance(settings, Mapping):
            return None
        values |= reading.values
        for front in reading.fronts.values():
            values |= {} if front is None else {EXPERTS: front}
    return values


def saying(format: Description, values: Mapping[str, Any], settings: Mapping[str, Any],
           ) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The small tensors that a producer puts beside a weight, by name: dtype, shape and bytes.

    They hold JSON or a table, or, of a format whose numbers say parameters or N and K, a number or several.
    values: of parameters, N and K, and tensors of one number, and E for experts in one tensor.  settings: which of several words
    it is, where they say one of them; else the first.
    """
    small: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    counts = says_numbers(format)
    for key, rule in format.detect.get("tensors", {}).items():
        if isinstance(rule, Mapping):
            json_settings = {name: _written(wanted, values, settings.get(name)) for name, wanted in rule.items()}
            data = json.dumps(json_settings).encode()
            small[key] = "uint8", (len(data),), data
        elif isinstance(rule, str) and rule in format.tables:
            numbers = format.tables[rule]
            small[key] = "float32", (len(numbers),), struct.pack(f"<{len(numbers)}f", *numbers)
        elif counts:
            if isinstance(rule, list):                           # extents, which are of 64 bits in torch
                small[key] = "int64", (len(rule),), struct.pack(f"<{len(rule)}q", *(values.get(word, word) for word in rule))
            else:
                small[key] = "int32", (), struct.pack("<i", values.get(rule, rule))
    return small


def says_numbers(format: Description) -> bool:
    """Whether tensors of numbers beside a weight say parameters or N and K, without which its own tensors leave these open."""
    return any(word in (*format.params, *EXTENTS) for rule in format.detect.get("tensors", {}).values()
               if not isinstance(rule, Mapping) for word in (rule if isinstance(rule, list) else [rule]))


def says_extents(format: Description) -> bool:
    """Whether JSON beside a weight says N and K, and of experts in one tensor how many there are: all else is flat then."""
    rules = [rule for rule in format.detect.get("tensors", {}).values() if isinstance(rule, Mapping)]
    return any([*EXTENTS] == wanted for rule in rules for wanted in rule.values())


def numbers(format: Description) -> list[str]:
    """The tensors of one number that JSON beside a weight says: they are in no file."""
    rules = [rule for rule in format.detect.get("tensors", {}).values() if isinstance(rule, Mapping)]
    return [name for name in format.singles if any(name in rule.values() for rule in rules)]


def choices(format: Description) -> list[str]:
    """The settings in JSON beside a weight that are one of several words."""
    rules = [rule for rule in format.detect.get("tensors", {}).values() if isinstance(rule, Mapping)]
    return [name for rule in rules for name, wanted in rule.items()
            if isinstance(wanted, list) and not {*wanted} & {*EXTENTS, *format.params}]


def _written(wanted: Any, values: Mapping[str, Any], setting: object) -> Any:
    """A setting that makes a rule match."""
    words = wanted if isinstance(wanted, list) else [wanted]
    if all(word in values for word in words):
        front = [values[EXPERTS]] if EXPERTS in values else []
        return [*front, *(values[word] for word in words)] if isinstance(wanted, list) else values[words[0]]
    return next((word for word in words if setting is not None and same(setting, word)), words[0])


def same(value: object, word: object) -> bool:
    """Whether a setting is a rule's word; in letters of either case, which producers mix."""
    if word == "null" or value is None:
        return word == "null" and value is None
    if isinstance(value, str) and isinstance(word, str):
        return value.lower() == word.lower()
    return type(value) is type(word) and value == word
