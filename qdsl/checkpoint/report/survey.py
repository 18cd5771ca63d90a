"""A checkpoint's layers for people and programs: a line for all layers that are alike, so that a large model is a page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.groups import SHARED_MEMORY, Group, memory
from qdsl.checkpoint.detect.layers import Layer, Layers
from qdsl.checkpoint.files.folder import Folder

PROBLEMS = 20                                                    # that are shown of a kind

_NUMBER = re.compile(r"\d+")


def survey(folder: Folder, found: Layers, limit: int = SHARED_MEMORY) -> dict[str, Any]:
    """What was found of layers and groups, as data.  limit: bytes of shared memory that a GPU gives the kernel of a group."""
    held = [_group(folder, each, limit) for each in found.groups]
    inside = {full for each in held for full in each["tensors"].values()}
    left = {each.name: each for each in found.left}
    contradictions = [*({"what": problem} for problem in found.problems),
                      *({"layer": each.name, "what": each.why} for each in found.layers if each.why and not each.is_unknown),
                      *({"layer": each.name, "what": problem} for each in found.layers for problem in each.problems),
                      *({"layer": each.name, "what": each.problem} for each in found.left if each.problem),
                      *({"layer": each["name"], "what": problem} for each in held for problem in each["problems"])]
    return {"quantization": [{"source": each.source, "method": each.method, "settings": _finite(each.settings)}
                             for each in found.quantizations],
            "layers": [_layer(folder, each) for each in found.layers], "groups": held,
            "plain": [_plain(folder, name, left) for name in found.plain if name not in inside],
            "unknown": [{"layer": each.name, "what": each.why} for each in found.layers if each.is_unknown],
            "contradictions": contradictions}


def weights(folder: Folder, found: Layers) -> tuple[int, int]:
    """How many weights layers, groups and plain tensors are, and in how many bytes; without layers of no format."""
    coded = {full for each in found.layers for full in (*each.tensors.values(), *each.settings)}
    coded |= {full for each in found.groups for full in each.tensors.values()}
    unread = {full for each in found.layers if not each.format for full in each.others.values()}
    known = [name for name in folder.names() if name not in unread]
    count = sum(map(_numbers, found.layers)) + sum(each.numbers for each in found.groups) + \
        sum(math.prod(folder.entry(name).shape) for name in known if name not in coded)
    return count, sum(folder.entry(name).nbytes for name in known)


def _numbers(layer: Layer) -> int:
    return math.prod(layer.shape) * (1 if layer.experts is None else layer.experts)


def _finite(value: Any) -> Any:
    """A config's value as JSON has it, without the Infinity and NaN that some have."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _layer(folder: Folder, layer: Layer) -> dict[str, Any]:
    return {"name": layer.name, "format": layer.format or None, "storage": layer.storage or None, "params": _params_of(layer),
            "shape": list(layer.shape) if layer.format else None, "experts": layer.experts, "turned": layer.turned,
            "bits_per_weight": _bits(folder, layer.tensors.values(), _numbers(layer)), "tensors": dict(layer.tensors),
            "settings": list(layer.settings), "others": dict(layer.others), "by": layer.by,
            **({"why": layer.why} if layer.why else {})}


def _group(folder: Folder, group: Group, limit: int) -> dict[str, Any]:
    """A group, with what its kernel asks of a GPU; None where its tensors do not say that."""
    from qdsl.codecs.lookup import StreamError

    problems = [*group.problems, *([group.unnamed] if group.unnamed else [])]
    try:
        needs = memory(folder, group, limit)
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
    """Tables of what `survey` found: heads, rows, and which columns are aligned at the right."""
    known = [each for each in data["layers"] if each["format"]]
    layers = [[name, str(len(alike)), f"{first['format']}.{first['storage']}", _extents(first),
               _between(alike, "bits_per_weight"), _params(first["params"]), ", ".join(first["others"]), first["by"]]
              for name, alike in _grouped(known, lambda each: (each["format"], each["storage"], _params(each["params"]),
                                                               _extents(each), *each["others"], each["by"]))
              for first in alike[:1]]
    groups = [[name, str(len(alike)), first["format"], str(len(first["weights"])), str(sum(first["weights"].values())),
               _between(alike, "bits_per_weight"), _between(alike, "threads_per_block"), _between(alike, "shared_memory"),
               _fitting(alike)]
              for name, alike in _grouped(data["groups"], lambda each: (each["format"], tuple(each["weights"].values()),
                                                                        fits(each))) for first in alike[:1]]
    plain = [[name, str(len(alike)), first["type"], " x ".join(map(str, first["shape"])), first["by"]]
             for name, alike in _grouped(data["plain"], lambda each: (each["type"], tuple(each["shape"]), each["by"]))
             for first in alike[:1]]
    unknown, contradictions = (_told(data[kind]) for kind in ("unknown", "contradictions"))
    return [(["layers", "", "format", "shape", "bits", "parameters", "beside", "by"], layers, " >"),
            (["groups", "", "format", "weights", "numbers", "bits", "threads", "shared memory", ""], groups, " > >>>>>"),
            (["not quantized", "", "type", "shape", "by"], plain, " >"),
            (["not known", "", ""], unknown, " >"), (["contradictions", "", ""], contradictions, " >")]


def _told(problems: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of problems of layers, the first of those there are."""
    named = [{"name": each.get("layer", ""), **each} for each in problems]
    rows = [[name, str(len(alike)), alike[0]["what"]] for name, alike in _grouped(named, lambda each: each["what"])]
    return rows[:PROBLEMS] + ([[f"and {len(rows) - PROBLEMS} more", "", ""]] if len(rows) > PROBLEMS else [])


def fits(group: Mapping[str, Any]) -> bool:
    """Whether the kernel of a DF11 group needs no more shared memory than there is."""
    return group["shared_memory"] is None or group["shared_memory"] <= group["shared_memory_limit"]


def _fitting(alike: Sequence[Mapping[str, Any]]) -> str:
    """What to do about groups that need more shared memory than there is."""
    if fits(alike[0]):
        return ""
    known = [each["threads_that_fit"] for each in alike]
    remedy = "no number of threads fits" if None in known else f"{min(known)} threads fit"
    return f"more than {alike[0]['shared_memory_limit']}: {remedy}"


def _grouped(rows: Sequence[Mapping[str, Any]], key: Any) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Rows of one kind whose names differ in numbers alone, together, and what they are called then."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((_NUMBER.sub("*", row["name"]), key(row)), []).append(row)
    return [(_together([row["name"] for row in group]), group) for group in groups.values()]


def _between(alike: Sequence[Mapping[str, Any]], key: str) -> str:
    """The values of rows, from the least to the largest."""
    values = [f"{each[key]:.5g}" if isinstance(each[key], float) else str(each[key]) for each in
              sorted((each for each in alike if each[key] is not None), key=lambda each: float(each[key]))]
    return "-" if not values else values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def _together(names: Sequence[str]) -> str:
    """One name for names that differ in numbers: 'layers.{0-31}.mlp'."""
    numbers = [set(map(int, column)) for column in zip(*map(_NUMBER.findall, names), strict=True)]
    found = iter(numbers)
    return _NUMBER.sub(lambda match: match[0] if len(each := next(found)) == 1 else "{" + _ranges(each) + "}", names[0])


def _ranges(numbers: Iterable[int]) -> str:
    """'0-2,5' of 0, 1, 2 and 5."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ",".join(shown if len(shown) <= 6 else [*shown[:3], "...", shown[-1]])


def _params_of(layer: Layer) -> dict[str, int | str]:
    """A layer's parameters, without the types of optional tensors that it does not have."""
    if not layer.format:
        return dict(layer.params)
    layout = next(form for form in descriptions() if form.name == layer.format).layout(layer.storage, layer.params)
    absent = {stored.dtype for name, stored in layout.items() if stored.optional and name not in layer.tensors}
    return {name: value for name, value in layer.params.items() if name not in absent}


def _extents(layer: Mapping[str, Any]) -> str:
    return " x ".join(map(str, [*([layer["experts"]] if layer["experts"] is not None else []), *layer["shape"]])) + \
        (", turned" if layer["turned"] else "")


def _params(params: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in params.items())
