"""A checkpoint's layers for people and programs: a line for all layers that are alike, so that a large model is a page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qdsl.checkpoint.folder import Folder
from qdsl.checkpoint.layers import Layer, Layers

PROBLEMS = 20                                                    # that are shown of a kind

_NUMBER = re.compile(r"\d+")


def survey(folder: Folder, found: Layers) -> dict[str, Any]:
    """What was found of layers, as data."""
    left = {each.name: each for each in found.left}
    contradictions = [*({"what": problem} for problem in found.problems),
                      *({"layer": each.name, "what": each.why} for each in found.layers if each.why),
                      *({"layer": each.name, "what": problem} for each in found.layers for problem in each.problems),
                      *({"layer": each.name, "what": each.problem} for each in found.left if each.problem)]
    return {"quantization": [{"source": each.source, "method": each.method, "settings": _finite(each.settings)}
                             for each in found.quantizations],
            "layers": [_layer(each) for each in found.layers],
            "plain": [_plain(folder, name, left) for name in found.plain],
            "contradictions": contradictions}


def _finite(value: Any) -> Any:
    """A config's value as JSON has it, without the Infinity and NaN that some have."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _layer(layer: Layer) -> dict[str, Any]:
    return {"name": layer.name, "format": layer.format or None, "storage": layer.storage or None, "params": dict(layer.params),
            "shape": list(layer.shape) if layer.format else None, "experts": layer.experts, "tensors": dict(layer.tensors),
            "settings": list(layer.settings), "others": dict(layer.others), "by": layer.by,
            **({"why": layer.why} if layer.why else {})}


def _plain(folder: Folder, name: str, left: Mapping[str, Any]) -> dict[str, Any]:
    entry, module = folder.entry(name), left.get(name.removesuffix(".weight"))
    return {"name": name, "type": entry.dtype, "shape": list(entry.shape), "by": module.by if module else ""}


# As text

def tables(data: Mapping[str, Any]) -> list[tuple[list[str], list[list[str]], str]]:
    """Tables of what `survey` found: heads, rows, and which columns are aligned at the right."""
    known = [each for each in data["layers"] if each["format"]]
    layers = [[name, str(count), f"{each['format']}.{each['storage']}", _extents(each), _params(each["params"]), each["by"]]
              for name, count, each in _grouped(known, lambda each: (each["format"], each["storage"], _params(each["params"]),
                                                                     _extents(each), each["by"]))]
    plain = [[name, str(count), each["type"], " x ".join(map(str, each["shape"])), each["by"]]
             for name, count, each in _grouped(data["plain"], lambda each: (each["type"], tuple(each["shape"]), each["by"]))]
    problems = [[name, str(count), each["what"]] for name, count, each in
                _grouped([{"name": each.get("layer", ""), **each} for each in data["contradictions"]], lambda each: each["what"])]
    more = [[f"and {len(problems) - PROBLEMS} more", "", ""]] if len(problems) > PROBLEMS else []
    return [(["layers", "", "format", "shape", "parameters", "by"], layers, " >"),
            (["not quantized", "", "type", "shape", "by"], plain, " >"),
            (["contradictions", "", ""], problems[:PROBLEMS] + more, " >")]


def _grouped(rows: Sequence[Mapping[str, Any]], key: Any) -> list[tuple[str, int, Mapping[str, Any]]]:
    """Rows of one kind whose names differ in numbers alone, as one: what they are called together, how many, and the first."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((_NUMBER.sub("*", row["name"]), key(row)), []).append(row)
    return [(_together([row["name"] for row in group]), len(group), group[0]) for group in groups.values()]


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


def _extents(layer: Mapping[str, Any]) -> str:
    return " x ".join(map(str, [*([layer["experts"]] if layer["experts"] is not None else []), *layer["shape"]]))


def _params(params: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in params.items())
