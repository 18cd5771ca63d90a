"""Recorded maps of GGUF language models: of which rows of which tensors each parameter of a transformers model consists.

A map is the inverse of llama.cpp's converter for one model type, one JSON file in qdsl/models/maps.  It has the rules of
the `parts` that it names (gguf_map_parts.json), and `tensors` of its own.  Rules have names, not numbers:
`num_attention_heads * 2 -> num_attention_heads 2 *` takes rows, viewed as the axes on the left, in the order of the axes on the
right.  An axis is a number, an attribute of the model's config, a product of them as `heads*width`, or `*` for what remains.
`by num_kv_heads: num_attention_heads num_kv_heads num_kv_heads` divides rows into sections of these sizes, and each section among
the groups; it takes all that belongs to the first group, then the second.  `64:128 0:64` takes rows 64 to 127, then the first 64;
`0:64:2` every second one of these.  `each 64: 32:64 0:32` does so in each 64 rows; `of 64:128, heads 2 * -> heads * 2` in these.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qdsl.checkpoint.files.safetensors import shown
from qdsl.models.plan import LoadError

FOLDER = Path(__file__).parent / "maps"
PARTS = Path(__file__).with_name("gguf_map_parts.json")
RECORDED = "llama-cpp-python 0.3.36"                             # the release of the converter
BLOCK = "{block}"
GROUPED = "by "                                                  # begins a rule of groups
PERIODIC = "each "                                                   # begins a rule of spans in each so many rows
PART = "of "                                                     # begins a rule of rows of a part
LATENT = "latent_kv"                                             # rows of keys, transposed in the file, and values, by head
# Numbers of a parameter by those of the file, where the converter changes them.
VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "minus_one": lambda tensor: tensor - 1,                      # norms of weight + 1
    "log_of_negative": lambda tensor: torch.log(-tensor),        # A of state spaces, stored as -exp(A_log)
}
INVERSE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "minus_one": lambda tensor: tensor + 1,
    "log_of_negative": lambda tensor: -torch.exp(tensor),
}


@dataclass(frozen=True, slots=True)
class TensorRule:
    """How a model parameter is assembled from tensors of a GGUF file.

    sources: names of tensors, whose rows follow one another.  rows: the order in which they are taken, '' for as they are;
    or LATENT, for keys [heads, rank, n] and values [heads, m, rank] of which each head has n + m rows.
    elements: the order is that of single numbers.  transposed: the parameter has its last two axes the other way round.
    values: a name of VALUES, '' for unchanged numbers.
    """

    sources: tuple[str, ...]
    rows: str = ""
    elements: bool = False
    transposed: bool = False
    values: str = ""

    @classmethod
    def of(cls, record: str | Mapping[str, Any]) -> TensorRule:
        """The rule of a JSON record: the name of an equal tensor, or a mapping."""
        if isinstance(record, str):
            return cls((record,))
        return cls(tuple(record["from"].split()), **{key: value for key, value in record.items() if key != "from"})

    def record(self) -> str | dict[str, Any]:
        further = {key: value for key in ("rows", "elements", "transposed", "values") if (value := getattr(self, key))}
        return {"from": " ".join(self.sources), **further} if further or len(self.sources) > 1 else self.sources[0]


@dataclass(frozen=True, slots=True)
class GgufMap:
    """The map between a GGUF file and the parameters of one model type.

    architecture: as `general.architecture` of files names it.  model_class: the class of transformers whose parameters the names
    are.  rules: by the names of parameters, with {block} for the number of a layer, or of one layer.  unused: tensors of files
    that the model has no use for.
    """

    model_type: str
    architecture: str
    model_class: str
    rules: Mapping[str, TensorRule]
    unused: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> GgufMap:
        """Reads the map of a JSON file."""
        record = json.loads(path.read_text())
        rules = {name: rule for part in record["parts"].split() for name, rule in _parts()[part].items()}
        rules |= {name: TensorRule.of(rule) for name, rule in record.get("tensors", {}).items()}
        return cls(path.stem, record["architecture"], record["class"], rules, tuple(record.get("unused", "").split()))

    def text(self) -> str:
        """The map as JSON text, a rule in a line."""
        parts = {name: part for name, part in _parts().items() if part.items() <= self.rules.items()}
        own = self.rules.keys() - {name for part in parts.values() for name in part}
        record = {"architecture": self.architecture, "class": self.model_class, "parts": " ".join(parts)}
        record |= {"unused": " ".join(self.unused)} if self.unused else {}
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()]
        tensors = [f"  {json.dumps(name)}: {json.dumps(rule.record())}" for name, rule in self.rules.items() if name in own]
        lines += [' "tensors": {\n' + ",\n".join(tensors) + "\n }"] if tensors else []
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def rule(self, name: str) -> TensorRule | None:
        """The rule of a parameter, with the number of its layer in the source names; None where none is recorded."""
        pattern, block = pattern_of(name)
        rule = self.rules.get(name) or self.rules.get(pattern)
        if rule is None:
            return None
        sources = tuple(source.replace(BLOCK, block) for source in rule.sources)
        return TensorRule(sources, rule.rows, rule.elements, rule.transposed, rule.values)

    def is_recorded(self, tensor: str) -> bool:
        """Whether a tensor of a file has a place in the map."""
        pattern, _ = pattern_of(tensor)
        return pattern in self.unused or tensor in self.unused or any(
            {pattern, tensor} & {*rule.sources} for rule in self.rules.values())


@cache
def _parts() -> dict[str, dict[str, TensorRule]]:
    """Rules that maps have in common, by the names of parts of models."""
    parts = json.loads(PARTS.read_text())
    return {part: {name: TensorRule.of(rule) for name, rule in rules.items()} for part, rules in parts.items()}


@cache
def model_types() -> tuple[str, ...]:
    """The model types of transformers with a recorded map."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@cache
def model_types_of(architecture: str) -> tuple[str, ...]:
    """The model types with a recorded map of an architecture."""
    return tuple(name for name in model_types() if GgufMap.read(FOLDER / f"{name}.json").architecture == architecture)


def map_of(model_type: str, architecture: str) -> GgufMap:
    """The map of a model type for a file's architecture.  Raises LoadError where none is recorded."""
    if model_type not in model_types():
        raise LoadError(f"no map from GGUF is recorded for model type {shown(model_type)}, architecture {shown(architecture)}; "
                        f"there are {', '.join(model_types())}")
    recorded = GgufMap.read(FOLDER / f"{model_type}.json")
    if recorded.architecture != architecture:
        raise LoadError(f"the config's model type {shown(model_type)} is architecture {shown(recorded.architecture)} in GGUF "
                        f"files, and this file has {shown(architecture)}: it is of another model than the config")
    return recorded


def pattern_of(name: str) -> tuple[str, str]:
    """A name with {block} for its first whole number, and that number; '' where it has none."""
    block = next((part for part in name.split(".") if part.isdecimal()), "")
    return re.sub(rf"(?<![^.]){block}(?![^.])", BLOCK, name, count=1) if block else name, block


def row_order(rows: str, config: object, count: int) -> Tensor:
    """The row numbers int64 [count] that a rule takes, in order.

    Raises LoadError where the axes of the rule do not divide `count` rows.
    """
    if rows.startswith(GROUPED):
        return _grouped_order(rows, config, count)
    if rows.startswith(PART):
        span, _, inner = rows.removeprefix(PART).partition(", ")
        own = torch.arange(*map(int, span.split(":")), device="cpu")
        return own[row_order(inner, config, len(own))] if inner else own
    if rows.startswith(PERIODIC):
        size, _, spans = rows.removeprefix(PERIODIC).partition(": ")
        starts = torch.arange(0, count, int(size), device="cpu").view(-1, 1)
        return (starts + row_order(spans, config, int(size))).flatten()
    if are_spans(rows):
        return torch.cat([torch.arange(*map(int, span.split(":")), device="cpu") for span in rows.split()])
    left, right = (side.split() for side in rows.split(" -> "))
    sizes = [_axis(axis, config) for axis in left]
    product = math.prod(size for size in sizes if size > 0)
    if count % product or (-1 not in sizes and count != product):
        raise LoadError(f"{count} rows do not divide by '{rows}', whose axes are {sizes} in the config")
    return torch.arange(count, device="cpu").view(sizes).permute([left.index(axis) for axis in right]).flatten()


def are_spans(rows: str) -> bool:
    """Whether a rule states row numbers."""
    return ":" in rows and not rows.startswith(GROUPED)


def _grouped_order(rows: str, config: object, count: int) -> Tensor:
    """`row_order` of a rule with sections that are divided among groups."""
    groups, *sections = (_axis(axis, config) for axis in rows.removeprefix(GROUPED).replace(":", "").split())
    unit, left = divmod(count, sum(sections))
    if left or any(section * unit % groups for section in sections):
        raise LoadError(f"{count} rows do not divide by '{rows}', whose {groups} groups have sections of {sections} in the "
                        "config")
    parts = torch.split(torch.arange(count, device="cpu"), [section * unit for section in sections])
    return torch.cat([part.view(groups, -1) for part in parts], 1).flatten()


def _axis(axis: str, config: object) -> int:
    """The size of an axis; -1 for `*`."""
    if axis == "*":
        return -1
    if "*" in axis:
        return math.prod(_axis(own, config) for own in axis.split("*"))
    size = int(axis) if axis.isdecimal() else getattr(config, axis, None)
    if not isinstance(size, int) or size < 1:
        raise LoadError(f"the config has no number {axis!r}, by which rows of the GGUF file are ordered")
    return size


def joined_shape(shapes: Sequence[tuple[int, ...]], elements: bool) -> tuple[int, int]:
    """(rows, columns) of concatenated tensors; one column for single numbers and vectors."""
    columns = 1 if elements or len(shapes[0]) < 2 else shapes[0][-1]
    return sum(math.prod(shape) for shape in shapes) // columns, columns



# -- the inverse: tensors of files from parameters -----------------------------------------------------------------------


def is_row_wise(rule: TensorRule) -> bool:
    """Whether every row of the file's tensors is an unchanged row of the parameter."""
    return not (rule.elements or rule.transposed or rule.values or rule.rows == LATENT)


def source_tensors(rule: TensorRule, tensor: Tensor, config: object) -> list[Tensor]:
    """The tensors of the file for a parameter, one for each source of its rule.  On meta the order of rows is unchanged."""
    if rule.rows == LATENT:
        return list(latent_parts(config, tensor))
    rows = rows_of(tensor, rule)
    if rule.rows and tensor.device.type != "meta":
        rows = rows[torch.argsort(row_order(rule.rows, config, len(rows)))]
    shape = tensor.shape[:-2] + tensor.shape[:-3:-1] if rule.transposed else tensor.shape
    if len(rule.sources) > 1:
        shape = torch.Size((shape[0], -1, shape[-1])[3 - len(shape):] if not rule.elements else (shape[0], -1))
    parts = torch.split(rows, source_rows(rule, config, len(rows)))
    return [INVERSE.get(rule.values, torch.clone)(part.reshape(shape)) for part in parts]


def rows_of(tensor: Tensor, rule: TensorRule) -> Tensor:
    """A parameter's rows as files store them, in the parameter's order: [rows, K]."""
    transposed = tensor.transpose(-1, -2) if rule.transposed else tensor
    return transposed.reshape(-1, transposed.shape[-1] if transposed.dim() > 1 and not rule.elements else 1)


def latent_parts(config: Any, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [heads, rank, n] and values [heads, m, rank] of a parameter [heads * (n + m), rank]."""
    heads = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
    keys, values = heads[:, :config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim:]
    return keys.transpose(1, 2).contiguous(), values.contiguous()


def source_rows(rule: TensorRule, config: Any, count: int) -> list[int]:
    """How many of a parameter's rows each source has: equal shares, or for groups, one section in the last."""
    if not rule.rows.startswith(GROUPED) or len(rule.sources) == 1:
        return [count // len(rule.sources)] * len(rule.sources)
    sizes = [_axis(section, config) for section in rule.rows.split(": ")[1].split()]
    last = count * sizes[-1] // sum(sizes)
    return [count - last, last]
