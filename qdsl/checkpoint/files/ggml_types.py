"""The tensor types of GGUF files: numbers, names, and the size of a block of each."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One tensor type: a block of `elements` consecutive weights of a row takes `nbytes` bytes; both are 0 for an unknown type.

    head: the bytes ahead of the blocks of each row.
    """

    id: int
    name: str
    elements: int
    nbytes: int
    head: int = 0

    @property
    def is_readable(self) -> bool:
        """Whether the size of a block of this type is defined here."""
        return self.elements > 0

    @property
    def bits(self) -> float:
        """Bits per element of a block.  Only for readable types."""
        return 8 * self.nbytes / self.elements

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row, whose length must be a multiple of the block."""
        return self.head + columns // self.elements * self.nbytes


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TYPES = {id: GgmlType(id, name, *sizes) for name, (id, *sizes) in _TABLE["types"].items()}
BY_NAME = {type.name: type for type in TYPES.values()}
REMOVED = {int(id): name for id, name in _TABLE["removed"].items()}

# Types whose elements are numbers of torch's own, and what torch calls them.
TORCH = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
         "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"}
WEIGHTLESS = ("F64", "I8", "I16", "I32", "I64")                   # what is stored in these is no weight


def type_of(id: int) -> GgmlType:
    """The type with a number; a removed or unknown one has blocks of 0 elements, and a name that says so."""
    return TYPES[id] if id in TYPES else GgmlType(id, f"removed {REMOVED[id]}" if id in REMOVED else f"unknown {id}", 0, 0)
