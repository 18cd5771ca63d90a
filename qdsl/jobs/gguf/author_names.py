"""Translates names and rows of diffusers' tensors into those of the files that authors of diffusion models publish.

A table of author_names.toml lists regular expressions of diffusers' names and what replaces them, applied in order.  '#0', '#1',
... are parts of one tensor; '#swap' has its halves in the other order.  LAST stands for the number of the last block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qdsl.core.places import table_of

Names = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [start, stop) of a tensor of diffusers."""

    name: str
    start: int
    stop: int


# What 'BLOCK.' and 'SINGLE.' stand for in the tables.
BLOCK, SINGLE = r"^transformer_blocks\.(\d+)\.", r"^single_transformer_blocks\.(\d+)\."
_TABLE = table_of(__file__)


def names_of(tables: Sequence[str]) -> Names:
    """The rules of some tables, one after the other."""
    return [(pattern.replace("BLOCK.", BLOCK).replace("SINGLE.", SINGLE), replacement)
            for table in tables for pattern, replacement in _TABLE["names"][table].items()]


# By class of diffusers: the architecture that GGUF files of the model state, and the table of its names.
CLASSES: dict[str, tuple[str, Names]] = {name: (row["architecture"], names_of(row["names"]))
                                         for name, row in _TABLE["classes"].items()}


def author_parts(names: Names, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Part, ...]]:
    """The tensors of the authors' file by name, each as a sequence of rows of tensors of diffusers.

    names: the table of the class.  shapes: of diffusers' tensors, by name.
    """
    blocks = [int(match[1]) for name in shapes if (match := re.match(BLOCK, name))]
    last = str(max(blocks, default=0))
    parts: dict[str, dict[str, tuple[Part, ...]]] = {}
    for own, shape in shapes.items():
        name, rows = own, shape[0] if shape else 1
        for pattern, replacement in names:
            name = re.sub(pattern.replace("LAST", last), replacement.replace("LAST", last), name)
        mark = next(iter(re.findall(r"#(\w+)", name)), "0")
        half = rows // 2
        order = ((half, rows), (0, half)) if mark == "swap" else ((0, rows),)
        parts.setdefault(re.sub(r"#\w+", "", name), {})[mark] = tuple(Part(own, *span) for span in order)
    return {name: tuple(part for mark in sorted(marked) for part in marked[mark]) for name, marked in parts.items()}
