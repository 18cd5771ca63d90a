"""Summarizes a checkpoint's layers for people and programs: one line for all layers that differ only in number."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qdsl.checkpoint.detect.descriptions import description_of
from qdsl.checkpoint.detect.groups import SHARED_MEMORY, Group, decoding_memory
from qdsl.checkpoint.detect.layer import Layer, Layers
from qdsl.checkpoint.detect.ledger import Finding, Kind
from qdsl.checkpoint.files.folder import Folder
from qdsl.core.transforms import transform_of

KINDS = {"acts": Kind.ACTS, "not_understood": Kind.UNKNOWN, "coarser": Kind.COARSER}      # the report's words for findings
PROBLEMS = 20                                                    # that are shown of a kind

_NUMBER = re.compile(r"\d+")


def survey(folder: Folder, layers: Layers, limit: int = SHARED_MEMORY) -> dict[str, Any]:
    """Layers, groups, plain tensors and problems of a checkpoint, as plain data.  limit: bytes of shared memory that a GPU gives
    the kernel of a group.

    contradictions: what numbers depend on, so that no weight is read.  acts, not_understood: settings and tensors with which
    models are not run.  coarser: those for x and caches in few bits.  warnings: problems that change no number, and layers that
    alone are not read.
    """
    groups = [_group(folder, entry, limit) for entry in layers.groups]
    inside = {full for entry in groups for full in entry["tensors"].values()}
    left = {entry.name: entry for entry in layers.left}
    contradictions = [*({"what": text} for text in layers.contradictions),
                      *({"layer": entry.name, "what": text} for entry in layers.layers for text in entry.contradictions),
                      *({"layer": entry["name"], "what": text} for entry in groups for text in entry["problems"])]
    warnings = [*({"what": text} for text in layers.problems),
                *({"what": str(finding)} for finding in layers.findings if finding.kind is Kind.NEW),
                *({"layer": entry.name, "what": entry.why} for entry in layers.layers
                  if entry.why and not entry.is_unknown and not entry.contradictions),
                *({"layer": entry.name, "what": text} for entry in layers.layers for text in entry.problems),
                *({"layer": entry.name, "what": entry.problem} for entry in layers.left if entry.problem)]
    return {"quantization": [{"source": entry.source, "method": entry.method, "settings": _finite(entry.settings)}
                             for entry in layers.quantizations],
            "layers": [_layer(folder, entry) for entry in layers.layers], "groups": groups,
            "plain": [_plain(folder, name, left) for name in layers.plain if name not in inside],
            "unknown": [{"layer": entry.name, "what": entry.why} for entry in layers.layers if entry.is_unknown],
            "contradictions": contradictions, "warnings": warnings,
            **by_kind(layers.findings)}


def by_kind(findings: Sequence[Finding]) -> dict[str, list[dict[str, Any]]]:
    """What a checkpoint says that is not computed, by the report's words for kinds."""
    return {name: [{"place": finding.place, "key": finding.key, "value": finding.value, "what": str(finding)}
                   for finding in findings if finding.kind is kind] for name, kind in KINDS.items()}


def count_weights(folder: Folder, layers: Layers) -> tuple[int, int]:
    """The number of weights of layers, groups and plain tensors, and their size in bytes; without unrecognised layers."""
    coded = {full for layer in layers.layers for full in (*layer.tensors.values(), *layer.settings)}
    coded |= {full for layer in layers.groups for full in layer.tensors.values()}
    unread = {full for layer in layers.layers if not layer.format for full in layer.others.values()}
    names = [name for name in folder.names() if name not in unread]
    count = sum(map(_numbers, layers.layers)) + sum(layer.numbers for layer in layers.groups) + \
        sum(math.prod(folder.entry(name).shape) for name in names if name not in coded)
    return count, sum(folder.entry(name).nbytes for name in names)


def _numbers(layer: Layer) -> int:
    return math.prod(layer.shape) * (1 if layer.experts is None else layer.experts)


def _finite(value: Any) -> Any:
    """A config's value with Infinity and NaN as strings, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _layer(folder: Folder, layer: Layer) -> dict[str, Any]:
    return {"name": layer.name, "format": layer.format or None, "storage": layer.storage or None, "params": _params_of(layer),
            "shape": list(layer.shape) if layer.format else None, "experts": layer.experts, "transposed": layer.transposed,
            "bits_per_weight": _bits(folder, layer.tensors.values(), _numbers(layer)), "tensors": dict(layer.tensors),
            "settings": list(layer.settings), "others": dict(layer.others), "by": layer.by,
            **({"transforms": [own.data() for own in layer.transforms]} if layer.transforms else {}),
            **({"why": layer.why} if layer.why else {})}


def _group(folder: Folder, group: Group, limit: int) -> dict[str, Any]:
    """A group, with the threads and shared memory of its kernel; None where its tensors do not state them."""
    from qdsl.core.codecs import StreamError

    problems = group.errors
    try:
        needs = decoding_memory(folder, group, limit)
    except StreamError as error:
        needs = None
        problems.append(str(error))
    return {"name": group.name, "format": group.format, "weights": dict(group.parts), "tensors": dict(group.tensors),
            "bits_per_weight": _bits(folder, group.tensors.values(), group.numbers), "problems": problems,
            "threads_per_block": needs.threads if needs else None, "shared_memory": needs.nbytes if needs else None,
            "shared_memory_limit": limit, "threads_that_fit": needs.fits if needs else None}


def _bits(folder: Folder, names: Iterable[str], weights: int) -> float | None:
    return 8 * sum(folder.entry(name).nbytes for name in names) / weights if weights else None


def _plain(folder: Folder, name: str, left: Mapping[str, Any]) -> dict[str, Any]:
    entry, module = folder.entry(name), left.get(name.removesuffix(".weight"))
    return {"name": name, "type": entry.dtype, "shape": list(entry.shape), "by": module.by if module else ""}


# As text

def tables(data: Mapping[str, Any]) -> list[tuple[list[str], list[list[str]], str]]:
    """The data of `survey` as tables: heads, rows, and which columns are right-aligned."""
    recognised = [row for row in data["layers"] if row["format"]]
    layers = [[name, str(len(alike)), f"{first['format']}.{first['storage']}", _extents(first),
               _value_range(alike, "bits_per_weight"), _params(first["params"]), _others_text(first), first["by"]]
              for name, alike in grouped(recognised, lambda row: (row["format"], row["storage"], _params(row["params"]),
                                                                   _extents(row), _others_text(row), row["by"]))
              for first in alike[:1]]
    groups = [[name, str(len(alike)), first["format"], str(len(first["weights"])), str(sum(first["weights"].values())),
               _value_range(alike, "bits_per_weight"), _value_range(alike, "threads_per_block"),
               _value_range(alike, "shared_memory"),
               _fitting(alike)]
              for name, alike in grouped(data["groups"], lambda row: (row["format"], tuple(row["weights"].values()),
                                                                       fits(row))) for first in alike[:1]]
    plain = [[name, str(len(alike)), first["type"], " x ".join(map(str, first["shape"])), first["by"]]
             for name, alike in grouped(data["plain"], lambda row: (row["type"], tuple(row["shape"]), row["by"]))
             for first in alike[:1]]
    return [(["layers", "", "format", "shape", "bits", "parameters", "beside", "by"], layers, " >"),
            (["groups", "", "format", "weights", "numbers", "bits", "threads", "shared memory", ""], groups, " > >>>>>"),
            (["not quantized", "", "type", "shape", "by"], plain, " >"),
            *problem_tables(data)]


def problem_tables(data: Mapping[str, Any]) -> list[tuple[list[str], list[list[str]], str]]:
    """The problems of a checkpoint as tables, in the same form."""
    problems = {head: _problem_rows(data.get(kind, ())) for head, kind in (
        ("not known", "unknown"), ("contradictions", "contradictions"), ("acts, and is not computed", "acts"),
        ("not understood", "not_understood"), ("computed in more bits", "coarser"), ("warnings", "warnings"))}
    return [([head, "", ""], rows, " >") for head, rows in problems.items()]


def _others_text(layer: Mapping[str, Any]) -> str:
    """The other tensors of a layer, and its transforms, with the last parts of tensors' names."""
    last, labels, tensors = layer["name"].rpartition(".")[2], [], set()
    for own in map(transform_of, layer.get("transforms", ())):
        tensors |= {*own.tensors, *own.repeats}
        parts = own.tensor.split(".")[-2:]
        labels.append(replace(own, tensor=".".join(parts[parts[0] == last:])).label)
    return ", ".join([*(leaf for leaf, full in layer["others"].items() if full not in tensors), *labels])


def _problem_rows(problems: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of a table of problems, at most PROBLEMS of them."""
    named = [{"name": problem.get("layer", ""), **problem} for problem in problems]
    rows = [[name, str(len(alike)), alike[0]["what"]] for name, alike in grouped(named, lambda problem: problem["what"])]
    return rows[:PROBLEMS] + ([[f"and {len(rows) - PROBLEMS} more", "", ""]] if len(rows) > PROBLEMS else [])


def fits(group: Mapping[str, Any]) -> bool:
    """Whether the kernel of a DF11 group needs no more shared memory than the limit."""
    return group["shared_memory"] is None or group["shared_memory"] <= group["shared_memory_limit"]


def _fitting(alike: Sequence[Mapping[str, Any]]) -> str:
    """Which number of threads would fit, for groups that need more shared memory than the limit."""
    if fits(alike[0]):
        return ""
    thread_counts = [row["threads_that_fit"] for row in alike]
    remedy = "no number of threads fits" if None in thread_counts else f"{min(thread_counts)} threads fit"
    return f"more than {alike[0]['shared_memory_limit']}: {remedy}"


def grouped(rows: Sequence[Mapping[str, Any]], key: Any) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Rows whose names differ only in numbers and whose key is the same, together under one name."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((_NUMBER.sub("*", row["name"]), key(row)), []).append(row)
    return [(_name_of_alike([row["name"] for row in group]), group) for group in groups.values()]


def _value_range(alike: Sequence[Mapping[str, Any]], key: str) -> str:
    """The values of rows as 'least to largest'."""
    values = [f"{row[key]:.5g}" if isinstance(row[key], float) else str(row[key]) for row in
              sorted((row for row in alike if row[key] is not None), key=lambda row: float(row[key]))]
    return "-" if not values else values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def _name_of_alike(names: Sequence[str]) -> str:
    """One name for names that differ only in numbers: 'layers.{0-31}.mlp'."""
    numbers = [set(map(int, column)) for column in zip(*map(_NUMBER.findall, names), strict=True)]
    sets = iter(numbers)
    return _NUMBER.sub(lambda match: match[0] if len(values := next(sets)) == 1 else "{" + _ranges_text(values) + "}", names[0])


def _ranges_text(numbers: Iterable[int]) -> str:
    """The numbers as ranges: '0-2,5' for 0, 1, 2 and 5."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ",".join(shown if len(shown) <= 6 else [*shown[:3], "...", shown[-1]])


def _params_of(layer: Layer) -> dict[str, int | str]:
    """A layer's parameters, without the dtypes of optional tensors that are absent."""
    if not layer.format:
        return dict(layer.params)
    layout = description_of(layer.format).layout(layer.storage, layer.params)
    absent = {stored.dtype for name, stored in layout.items() if stored.optional and name not in layer.tensors}
    return {name: value for name, value in layer.params.items() if name not in absent}


def _extents(layer: Mapping[str, Any]) -> str:
    return " x ".join(map(str, [*([layer["experts"]] if layer["experts"] is not None else []), *layer["shape"]])) + \
        (", transposed" if layer["transposed"] else "")


def _params(params: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in params.items())
