"""Checks that storages, parameters and tensors named by rules under `detect` exist."""

from __future__ import annotations

import re
from collections.abc import Iterable

from qdsl.compiler.spec.marked import Mapping, Node, Sequence
from qdsl.compiler.spec.model import Param, Storage
from qdsl.compiler.spec.source import Problems, Text, did_you_mean

_HEX = re.compile(r"0x[0-9a-f]{8}\Z")


def check_detection(problems: Problems, node: Node | None, params: Iterable[Param], storages: Iterable[Storage]) -> None:
    """Rules are mappings, and name existing storages, parameters and tensors: `words`, `spills`, `repacked`."""
    names = [storage.name.value for storage in storages]
    params = list(params)
    tensors = {tensor.stored_name.value for storage in storages for tensor in storage.tensors}
    listed = [(key.value, rule) for key, value in (node.items if isinstance(node, Mapping) else ())
              for rule in (value.items if isinstance(value, Sequence) else (value,))
              if key.value in ("words", "spills")]
    for word, types in node.items if isinstance(node, Mapping) else ():
        if check := {"repacked": _check_repacked, "claimed": _check_claimed}.get(word.value):
            check(problems, types, names)
    for key, rule in listed:
        if not isinstance(rule, Mapping):
            problems.add(rule.span, f"a rule of '{key}' must be a mapping, `key: value`")
            continue
        for name, value in rule.items:
            text = value.value if isinstance(value, Text) else ""
            if name.value == "storage" and text not in names:
                problems.add(value.span, f"there is no storage '{text}'{did_you_mean(text, names)}")
            elif key == "words" and name.value in tensors and not _HEX.match(text):
                problems.add(value.span, "a word has 32 bits, as 0x88888888")
            elif key == "spills" and name.value != "storage":
                _check_overflowed_zeros(problems, name, value, params, tensors)
            elif key == "words" and name.value not in ("storage", *(p.name.value for p in params), *tensors):
                near = did_you_mean(name.value, tensors)
                problems.add(name.span, f"'{name}' is neither a parameter nor a tensor{near}")


def _check_claimed(problems: Problems, storages: Node, names: list[str]) -> None:
    """A list of storages."""
    for storage in storages.items if isinstance(storages, Sequence) else (storages,):
        if not isinstance(storage, Text) or storage.value not in names:
            problems.add(storage.span, f"'claimed' lists storages: {', '.join(names)}")


def _check_repacked(problems: Problems, rules: Node, names: list[str]) -> None:
    """A mapping from names of types to storages."""
    if not isinstance(rules, Mapping):
        problems.add(rules.span, "expected types and their storages, `{TYPE: storage}`")
        return
    for _, storage in rules.items:
        word = storage.value if isinstance(storage, Text) else ""
        if word not in names:
            problems.add(storage.span, f"there is no storage '{word}'{did_you_mean(word, names)}")


def _check_overflowed_zeros(problems: Problems, name: Text, bits: Node, params: Iterable[Param], tensors: set[str]) -> None:
    """A tensor, and the parameter with the number of bits of its fields."""
    if name.value not in tensors:
        problems.add(name.span, f"there is no tensor '{name}'{did_you_mean(name.value, tensors)}")
    widths = [param.name.value for param in params if all(type(value) is int and 1 <= value <= 32 for value in param.values)]
    if not isinstance(bits, Text) or bits.value not in widths:
        problems.add(bits.span, "expected the parameter that says how many bits a field has")
