"""Derives storage and parameters from settings, by the rules of producers and by those of a format's spec for small tensors.

Settings come from a checkpoint's config, a header's metadata, or numbers in small tensors next to a weight.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qdsl.core.producer import ABOUT_RULE, WORDS
from qdsl.core.shapes import BlockLengths, is_unlisted
from qdsl.core.stored import Description
from qdsl.core.text import join_names

EXTENTS = ("N", "K")
EXTENTS_TEXT = re.compile(r"[0-9]{1,9}(x[0-9]{1,9})+")           # of a block, as old releases of compressed-tensors write them
EXPERTS = "E"                                                    # the number of experts, before N and K
VERSION = 1                                                      # of these settings
OWN = "qdsl"                                                     # the quant_method of settings of no producer


@dataclass(frozen=True, slots=True)
class Reading:
    """The storage ('' if open) and the parameters that a matching rule determines.

    keys: the setting that gave each value, without constants of the rule; values may be unknown to the format.  weak: the rule
    took an absent setting as one of its alternatives.  follows: settings that follow from a tensor or field, with their values
    for either case.  constants: settings that are fixed in the format, as a word or as alternatives, or a parameter's name; they
    may be absent.  fronts: the prefix of lists for a further axis, of experts; None if settings have no prefix.
    """

    storage: str
    values: Mapping[str, Any]
    keys: Mapping[str, str]
    weak: bool = False
    fronts: Mapping[str, Any] = field(default_factory=dict)
    follows: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)


def own_rule(format: Description, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The rule for qdsl's own settings, used if no producer describes a storage; it leaves unstated settings open."""
    params = {name: name for name in format.params if name in settings}
    return {"quant_method": OWN, "version": [VERSION, "null"], "format": [format.name, "null"],
            "storage": str(settings.get("storage", "")), **params}


def readings(rules: object, names: Sequence[str], settings: Mapping[str, Any], stacks: bool = False) -> Iterator[Reading]:
    """The readings of all rules that match the settings.

    rules: one mapping or a list of them.  names: parameters, N and K.  stacks: settings may describe experts in one tensor.  In a
    rule a setting is a required word, a list of alternatives, 'null' if it must be absent, or names that take its values; dots
    select nested settings.  'storage' and 'where', values of parameters, say what the rule applies to.  Settings that follow from
    a tensor (another mapping), and those under 'fixed' and 'with', are not conditions.
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
        if isinstance(wanted, list) and isinstance(value, str) and EXTENTS_TEXT.fullmatch(value):
            value = [int(extent) for extent in value.split("x")]
        if any(is_same(value, word) for word in words):
            weak |= value is None and len(words) > 1
            continue
        many = value if isinstance(value, list) else [value]
        if stacks and isinstance(value, list) and isinstance(wanted, list):
            more = len(many) == len(words) + 1
            fronts[key] = many[0] if more else None
            many = many[more:]
        if value is None or isinstance(value, list) != isinstance(wanted, list) or len(many) != len(words):
            return None
        named = () if key in WORDS else names
        if not all(word in named or is_same(entry, word) for word, entry in zip(words, many, strict=True)):
            return None
        own = {word: entry for word, entry in zip(words, many, strict=True) if word in named}
        values |= own
        keys |= dict.fromkeys(own, key)
    follows = {key: wanted for key, wanted in rule.items() if key not in ABOUT_RULE and isinstance(wanted, Mapping)}
    return Reading(str(rule.get("storage", "")), values, keys, weak, fronts, follows, rule.get("fixed", {}))


def unmet(rule: Mapping[str, Any], names: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """The settings of a rule's conditions that are not as it has them, or absent."""
    return [key for key, wanted in rule.items() if key not in ABOUT_RULE and not isinstance(wanted, Mapping)
            and _reading({key: wanted}, names, settings) is None]


def unlisted_lengths(format: Description, settings: Mapping[str, Any]) -> list[Reading]:
    """The readings of settings with a block length that the format's spec does not list, with these values alone."""
    if not any(isinstance(values, BlockLengths) for values in format.params.values()):
        return []
    rules = own_rule(format, settings) if is_same(settings.get("quant_method"), OWN) else format.detect.get("config")
    lengths = [(reading, {name: value for name, value in reading.values.items()
                          if name in format.params and is_unlisted(format.params[name], value)})
               for reading in readings(rules, list(format.params), settings)]
    return [replace(reading, values=own) for reading, own in lengths if own]


def is_block(key: str) -> bool:
    """Whether a header's list has the extents of a block, and not those of the weight."""
    return key.endswith("block_size")


def at(settings: Mapping[str, Any], key: str) -> Any:
    """The setting of a name, with dots for nested ones, and numbers for those of a list; None if absent."""
    if key in settings:
        return settings[key]
    head, _, inner_key = key.partition(".")
    inner = settings.get(head)
    if isinstance(inner, list):
        inner = {str(place): own for place, own in enumerate(inner)}
    return at(inner, inner_key) if inner_key and isinstance(inner, Mapping) else None


def from_tensors(format: Description, contents: Mapping[str, Any]) -> dict[str, Any] | None:
    """Parameters, N, K and one-number tensors, as small tensors next to a weight state them; None if they state another format.

    E is the number of experts, if a list of N and K has it in front.  contents: of the existing tensors, JSON if the format's
    rule is a mapping, else numbers.
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


def content_error(format: Description, contents: Mapping[str, Any]) -> str:
    """What small tensors next to a weight say that is not of this format; '' where `from_tensors` reads them."""
    names = [*format.params, *EXTENTS, *format.singles]
    for key, rule in format.detect.get("tensors", {}).items():
        content = contents.get(key)
        if isinstance(rule, str) and rule in format.tables:
            if content not in (None, list(format.tables[rule])):
                return f"{key!r} holds other numbers than the table '{rule}'"
            continue
        settings = content if isinstance(content, Mapping) else {key: content}
        for name, wanted in (rule if isinstance(rule, Mapping) else {key: rule}).items() if content is not None else ():
            if _reading({name: wanted}, names, settings, isinstance(rule, Mapping)) is None:
                words = [str(word) for word in (wanted if isinstance(wanted, list) else [wanted]) if word not in names]
                needs = f"; the format needs {join_names(words, 'or')}" if words else ""
                return f"{key!r} says {name} = {at(settings, name)}{needs}"
    return ""


def small_tensors_for(format: Description, values: Mapping[str, Any], settings: Mapping[str, Any],
                      ) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The small tensors that a producer writes next to a weight, by name: dtype, shape and bytes.

    They hold JSON or a table, or numbers that state parameters or N and K.  values: of parameters, N and K, and one-number
    tensors, and E for experts in one tensor.  settings: choose among alternative words; by default the first.
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
            if isinstance(rule, list):                           # extents, which torch has as 64-bit integers
                small[key] = "int64", (len(rule),), struct.pack(f"<{len(rule)}q", *(values.get(word, word) for word in rule))
            else:
                small[key] = "int32", (), struct.pack("<i", values.get(rule, rule))
    return small


def says_numbers(format: Description) -> bool:
    """Whether numbers next to a weight state parameters or N and K that its tensors leave open."""
    return any(word in (*format.params, *EXTENTS) for rule in format.detect.get("tensors", {}).values()
               if not isinstance(rule, Mapping) for word in (rule if isinstance(rule, list) else [rule]))


def says_extents(format: Description) -> bool:
    """Whether JSON next to a weight states N and K, and the number of experts: its tensors are then flat."""
    rules = [rule for rule in format.detect.get("tensors", {}).values() if isinstance(rule, Mapping)]
    return any([*EXTENTS] == wanted for rule in rules for wanted in rule.values())


def numbers(format: Description) -> list[str]:
    """One-number tensors that JSON next to a weight states; they are in no file."""
    rules = [rule for rule in format.detect.get("tensors", {}).values() if isinstance(rule, Mapping)]
    return [name for name in format.singles if any(name in rule.values() for rule in rules)]


def choices(format: Description) -> list[str]:
    """Settings in JSON next to a weight that have alternative words."""
    rules = [rule for rule in format.detect.get("tensors", {}).values() if isinstance(rule, Mapping)]
    return [name for rule in rules for name, wanted in rule.items()
            if isinstance(wanted, list) and not {*wanted} & {*EXTENTS, *format.params}]


def _written(wanted: Any, values: Mapping[str, Any], setting: object) -> Any:
    """A setting that makes a rule match."""
    words = wanted if isinstance(wanted, list) else [wanted]
    if all(word in values for word in words):
        front = [values[EXPERTS]] if EXPERTS in values else []
        return [*front, *(values[word] for word in words)] if isinstance(wanted, list) else values[words[0]]
    return next((word for word in words if setting is not None and is_same(setting, word)), words[0])


def is_same(value: object, word: object) -> bool:
    """Whether a setting is a rule's word; ignores case, which producers mix."""
    if word == "null" or value is None:
        return word == "null" and value is None
    if isinstance(value, str) and isinstance(word, str):
        return value.lower() == word.lower()
    return type(value) is type(word) and value == word
