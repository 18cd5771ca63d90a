"""Accounts for tensors next to weights: biases, scales of x and of caches, and what is not understood."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from functools import cache

from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.ledger import Finding, Kind
from qdsl.checkpoint.detect.producers import Producers, producers
from qdsl.checkpoint.files.folder import Folder

NUMBERS = re.compile(r"\d+")
ZERO_POINT = "weight_zero_point"                                 # compressed-tensors', Quark's
ZEROS_LIMIT = 1 << 24                                            # most bytes that are read
UNKNOWN_EFFECT = "what the layer next to it computes"
Patterns = tuple[re.Pattern[str], re.Pattern[str], Mapping[re.Pattern[str], str]]


def tensor_findings(folder: Folder, layers: Iterable[Layer], plain: Iterable[str]) -> list[Finding]:
    """Tensors of recognised layers that nobody declares, those that are for x in few bits, and any that act; alike ones once.

    plain: tensors of no layer.
    """
    recognised = {layer.name: layer for layer in layers if layer.format}
    transforms = {full for layer in recognised.values() for own in layer.transforms for full in (*own.tensors, *own.repeats)}
    kinds = {full: kind_of(full, Kind.UNKNOWN) for layer in recognised.values() for leaf, full in layer.others.items()
             if full not in transforms and not is_bias(leaf)}
    for full in plain:
        module, _, leaf = full.rpartition(".")
        kind = kind_of(full, Kind.UNKNOWN if module in recognised and not is_bias(leaf) else None)
        if kind is not None and (kind[0] is Kind.ACTS or module in recognised):
            kinds[full] = kind
    return group_findings(folder, {full: kind for full, kind in kinds.items() if kind is not None and not _is_zero(folder, full)})


def _is_zero(folder: Folder, full: str) -> bool:
    """Whether a tensor has zero points that are all 0, as of a format without any."""
    entry = folder.entry(full)
    data = folder.file(full).start(full, entry.nbytes) if full.endswith(ZERO_POINT) and entry.nbytes <= ZEROS_LIMIT else b""
    return len(data) == entry.nbytes > 0 and not any(data)


def is_bias(leaf: str) -> bool:
    """Whether a tensor is a bias, by the last part of its name."""
    return leaf == "bias" or leaf.endswith("_bias")


def kind_of(full: str, default: Kind | None) -> tuple[Kind, str] | None:
    """What a tensor of this name does, and what it changes; None for one that is used or inert.  default: of other names."""
    nothing, coarser, acts = _patterns(producers())
    effect = next((text for pattern, text in acts.items() if pattern.match(full)), "")
    if effect:
        return Kind.ACTS, effect
    if coarser.match(full):
        return Kind.COARSER, ""
    return None if default is None or nothing.match(full) else (default, UNKNOWN_EFFECT)


def group_findings(folder: Folder, kinds: Mapping[str, tuple[Kind, str]]) -> list[Finding]:
    """Findings about tensors; those whose names differ in numbers alone are one."""
    groups: dict[tuple[str, Kind, str], list[str]] = {}
    for full, (kind, effect) in kinds.items():
        groups.setdefault((NUMBERS.sub("*", full), kind, effect), []).append(full)
    result = []
    for (_, kind, effect), names in groups.items():
        entry = folder.entry(names[0])
        more = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
        result.append(Finding(kind, "", names[0], f"{entry.dtype} {list(entry.shape)}{more}", effect))
    return result


@cache
def _patterns(registry: Producers) -> Patterns:
    """Names of tensors that are used or inert, of those that are coarser, and of those that act with what they change."""
    every = [producer.neighbors for producer in registry.every]
    acts = {re.compile(fnmatch.translate(pattern)): text for own in every for pattern, text in own.acts.items()}
    return _any_of([name for own in every for name in (*own.used, *own.inert)]), \
        _any_of([name for own in every for name in own.coarser]), acts


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """An expression that matches names of any pattern."""
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")
