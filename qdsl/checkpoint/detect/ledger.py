"""Accounts for every setting of a checkpoint's quantization, by what the files of producers declare.

A setting is used, inert, coarser (x or caches in few bits, with which qdsl computes in more), acts (it changes what the model
computes, and qdsl does not compute that), or is not understood.  Settings that are null, empty or false change nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.producers import ConfigKeys, Producers, producers
from qdsl.checkpoint.detect.rules import OWN
from qdsl.checkpoint.files.safetensors import CheckpointError, shown
from qdsl.core.producer import ABOUT_RULE, INLINE, NULL, Producer
from qdsl.core.text import counted

WEIGHTS = "weights"                                              # the settings of a group that are of its weights
SHOWN = 5                                                        # the most sentences of a refusal
# What a setting may change, by a part of its name.
OF_LAYERS = "what layers compute with x"
EFFECTS = {"kv_cache": "caches of keys and values", "activation": OF_LAYERS, "input": OF_LAYERS, "rotat": OF_LAYERS,
           "transform": OF_LAYERS, "": "the weights of layers"}


class Kind(StrEnum):
    """What a setting or a tensor does.  Those that act, that nobody understands, or that are missing, are refused."""

    ACTS = "acts"
    UNKNOWN = "not understood"
    MISSING = "missing"                                          # a parameter of the model's class
    COARSER = "coarser"
    NEW = "new"                                                  # a number or word in an object that grows with each release


@dataclass(frozen=True, slots=True)
class Finding:
    """A setting or a tensor with which qdsl does not compute.  place: of settings, the file and the keys that lead to them.

    effect: what it changes, or may change.  is_transform: whether transforms of layers, where there are some, compute it.
    """

    kind: Kind
    place: str
    key: str
    value: str
    effect: str = ""
    is_transform: bool = False

    @property
    def is_refused(self) -> bool:
        """Whether a model with it may compute other numbers than its producer's."""
        return self.kind in (Kind.ACTS, Kind.UNKNOWN, Kind.MISSING)

    def __str__(self) -> str:
        what = {Kind.ACTS: f"which changes {self.effect}: qdsl does not compute that",
                Kind.UNKNOWN: f"which may change {self.effect}: nothing is known about it",
                Kind.MISSING: f"and {self.effect} has it: loading the folder is refused",
                Kind.COARSER: "which is for x or caches in few bits: qdsl computes with them in more",
                Kind.NEW: "which is not known, and taken for a note of its producer"}[self.kind]
        return f"{self.place}: {self.key} is {self.value}, {what}" if self.place else f"tensor {self.key} is {self.value}, {what}"


@dataclass(frozen=True, slots=True)
class DeclaredSettings:
    """The settings that files of producers declare, with dots for nested ones.  kinds: None for those that are used or inert."""

    kinds: Mapping[str, Kind | None]
    acts: Mapping[str, str] = field(default_factory=dict)
    usual: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    transformed: frozenset[str] = frozenset()
    open: frozenset[str] = frozenset()
    tagged: frozenset[str] = frozenset()
    heads: frozenset[str] = frozenset()                          # names of objects that hold some of `kinds`
    grouped: frozenset[str] = frozenset()                        # settings that are of groups alone


def findings(method: str, place: str, settings: Mapping[str, Any]) -> list[Finding]:
    """What settings say that qdsl does not compute.  place: where they are.  settings: with the names of rules."""
    registry = producers()
    if not registry.is_known(method):
        unread = next((own.unread[method] for own in registry.every if method in own.unread), "")
        kind, what = (Kind.ACTS, f"all weights, {unread}") if unread else (
            Kind.UNKNOWN, "all weights, and what layers compute with x")
        return [Finding(kind, place, "quant_method", shown(method or "absent"), what)]
    walk = _Walk(_account(registry, method), registry.keys(method), INLINE in registry.of(method).layers, place)
    return list(dict.fromkeys(walk.of(settings, "", "", is_open="*" in walk.account.open)))


def header_findings(place: str, claims: Mapping[str, Any]) -> list[Finding]:
    """The same for the JSON that a header has of a weight."""
    registry = producers()
    walk = _Walk(_header_account(registry), registry.keys(""), False, place)
    return list(dict.fromkeys(walk.of(claims, "", "", is_open=False)))


def content_findings(leaf: str, content: Mapping[str, Any], keys: Container[str]) -> list[Finding]:
    """The same for the JSON in a small tensor next to a weight.  keys: those that specs read."""
    return [Finding(Kind.UNKNOWN, leaf, key, value_text(value), effect(key)) for key, value in content.items()
            if key not in keys and not is_nothing(value)]


def refuse_changes(path: Path, every: Iterable[Finding], allow_unknown: bool) -> list[str]:
    """Sentences on what changes a model and is not computed, which a report repeats.

    Raises CheckpointError for the first of them, unless `allow_unknown`.
    """
    sentences = [str(finding) for finding in every if finding.is_refused]
    if sentences and not allow_unknown:
        more = [f"and {counted(len(sentences) - SHOWN, 'finding')} more"] if len(sentences) > SHOWN else []
        raise CheckpointError("\n".join([f"{path}: the model may compute other numbers than its producer's; --allow-unknown, or "
                                         "allow_unknown=True, goes on all the same:", *(f"  {text}" for text in (
                                             *sentences[:SHOWN], *more))]))
    return sentences


class _Walk:
    """Visits settings, those of groups and of single layers too."""

    def __init__(self, account: DeclaredSettings, keys: ConfigKeys, is_inline: bool, place: str) -> None:
        self.account, self.keys, self.is_inline, self.place = account, keys, is_inline, place
        self.grouped = account.grouped                           # only groups have these
        self.containers = {*keys.patterns, *keys.layers, *keys.groups, WEIGHTS}

    def of(self, settings: Mapping[str, Any], start: str, path: str, is_open: bool) -> Iterator[Finding]:
        """The findings of an object.  start: its name in the file, with a dot.  path: the same as files of producers have it."""
        for key, value in settings.items():
            name = path + key
            if not start and key in self.grouped and not is_nothing(value):
                yield Finding(Kind.UNKNOWN, self.place, key, value_text(value), effect(key))
                continue
            if is_nothing(value) or any(value == usual for usual in self.account.usual.get(name, ())):
                continue
            if name in self.account.kinds and not (name in self.containers and isinstance(value, Mapping)):
                kind = self.account.kinds[name]
                if kind is not None:
                    yield Finding(kind, self.place, start + key, value_text(value), self.account.acts.get(name, ""),
                                  name in self.account.transformed)
            elif (inner := self._inner(path, key, value)) is not None:
                for label, own, below in inner:
                    yield from self.of(own, f"{start}{key}.{label}", below, is_open or name in self.account.open)
            elif is_open and not isinstance(value, Mapping | list) and value is not True:
                yield Finding(Kind.NEW, self.place, start + key, value_text(value))
            else:
                yield Finding(Kind.UNKNOWN, self.place, start + key, value_text(value), effect(start + key))

    def _inner(self, path: str, key: str, value: Any) -> list[tuple[str, Mapping[str, Any], str]] | None:
        """The objects of settings in an object or a list: their names in it, and their paths; None for what nobody declares."""
        name = path + key
        if isinstance(value, list) and name in self.account.heads and all(isinstance(own, Mapping) for own in value):
            return [(f"{place}.", own, f"{name}.") for place, own in enumerate(value)]
        if not isinstance(value, Mapping):
            return None
        objects = {f"{label}.": own for label, own in value.items() if isinstance(own, Mapping)}
        if not path and key in self.keys.patterns:
            how = self.keys.patterns[key]
            below, whole = f"{how.under}." if how.under else "", {name: own for name, own in value.items() if name in how.whole}
            return [*((label, own, below) for label, own in objects.items() if label[:-1] not in whole), ("", whole, below)]
        if not path and (key in self.keys.layers or key in self.keys.groups):
            others = {label: own for label, own in value.items() if key in self.keys.groups and f"{label}." not in objects}
            return [*((label, own, "") for label, own in objects.items()), ("", others, f"{key}.")]
        if not path and key == WEIGHTS:
            return [("", value, "")]
        if name in self.account.heads or name in self.account.open:
            return [("", value, f"{name}.")]
        if path and path.rstrip(".") in self.account.tagged:
            return [("", value, path)]
        return [("", value, "")] if not path and self.is_inline else None


def effect(name: str) -> str:
    """What a setting may change, by its name."""
    return next(text for part, text in EFFECTS.items() if part in name.lower())


def is_nothing(value: Any) -> bool:
    """Whether a setting is null, empty or false, as are all settings in it."""
    if isinstance(value, Mapping):
        return all(is_nothing(own) for own in value.values())
    if isinstance(value, list):
        return all(is_nothing(own) for own in value)
    return value is None or value is False or value == ""


def value_text(value: Any) -> str:
    """A setting's value for messages: words in quotes, at most a line."""
    return shown(value) if isinstance(value, str) else shown(str(value))[1:-1]


@cache
def _account(registry: Producers, method: str) -> DeclaredSettings:
    """The settings that a producer's own file, and the common one, declare; and those that all readers understand."""
    keys = registry.keys(method)
    params = {name for format in descriptions() for name in format.params} if method == OWN else ()
    account = _joined_accounts([registry.of(method), *(own for own in registry.every if own.common)], headers=False)
    lists = dict.fromkeys((*keys.skipped, *keys.only, *params))
    own = registry.of(method)
    grouped = () if own.groups is None else {*own.groups.weights} - {*own.inert, *keys.patterns, *keys.layers}
    return replace(account, kinds={**account.kinds, **lists}, grouped=frozenset(grouped))


@cache
def _header_account(registry: Producers) -> DeclaredSettings:
    return _joined_accounts([producer for producer in registry.every if producer.header is not None], headers=True)


def _joined_accounts(every: Sequence[Producer], headers: bool) -> DeclaredSettings:
    """What producers declare together; the first one counts.  headers: by their rules for headers, else those for configs."""
    kinds: dict[str, Kind | None] = {}
    for own in every:
        rules = [rule for by_format in (own.headers if headers else own.formats).values() for rule in by_format]
        read = [key for rule in rules for key, wanted in (*rule.items(), *rule.get("fixed", {}).items())
                if key not in ABOUT_RULE and wanted not in (NULL, None)]
        unnamed = [key for names in own.unnamed for key in names]
        used = (*own.inert, *own.used, *read, *unnamed, *own.settings, *own.settings.values(), *own.accepts)
        declared = {**dict.fromkeys(used), **dict.fromkeys(own.coarser, Kind.COARSER), **dict.fromkeys(own.acts, Kind.ACTS)}
        kinds = {**declared, **kinds}
    heads = {key[:place] for key in kinds for place, letter in enumerate(key) if letter == "."}
    return DeclaredSettings(kinds, {key: text for own in reversed(every) for key, text in own.acts.items()},
                            {key: values for own in reversed(every) for key, values in own.usual.items()},
                            frozenset(key for own in every for key in own.transformed),
                            frozenset(key for own in every for key in own.open),
                            frozenset(key for own in every for key in own.tagged),
                            frozenset(heads))
