"""Lookup tables in the forms of the lane-tile kernels (gpu/kernels/codebook.py): bytes in registers, or in memory."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from qdsl.compiler.ir.program import Program
from qdsl.compiler.passes.derive_planar import IN_REGISTERS
from qdsl.compiler.passes.pair_levels import TOP_BITS, bf16_bits, pair_bits

SMALLEST, LARGEST = 2.0 ** -14, 2.0 ** 15                        # float16's range of normal numbers; smaller ones lose bits


@dataclass(frozen=True, slots=True)
class Codebook:
    """A lookup table in registers.  numbers: integers within a byte's range of the least, or floats to round to x's dtype.

    unit: the power of two that float16 entries are divided by, so that they are neither too large nor subnormal.
    """

    numbers: tuple[int, ...] | tuple[float, ...]
    unit: float

    @property
    def is_int(self) -> bool:
        """Whether entries are bytes relative to the least, at least for float16; below 16 entries for bfloat16 too."""
        span = max(self.numbers) - min(self.numbers)
        return all(isinstance(number, int) for number in self.numbers) and span < (256 if len(self.numbers) >= 16 else 128)

    @property
    def is_split(self) -> bool:
        """Whether one half of 16 entries has no negative and the other no positive integers, each of 7 bits, but not together."""
        halves = sorted((self.numbers[:8], self.numbers[8:]))
        return len(self.numbers) == 16 and self.is_int and not self.is_short \
            and max(halves[0]) <= 0 <= min(halves[1]) and max(map(abs, self.numbers)) < 128

    @property
    def function(self) -> str:
        """The lookup function in gpu/kernels/bitplanes.py."""
        kind = ("split_" if self.is_split else "" if self.is_short else "wide_" if self.is_int
                else "paired_" if self.paired else "float_")
        return f"{kind}entries_of_{len(self.numbers)}"

    @property
    def is_short(self) -> bool:
        """Whether bfloat16 also has entries as bytes relative to the least: it has 7 bits after 128."""
        return self.is_int and max(self.numbers) - min(self.numbers) < 128

    @property
    def paired(self) -> list[int] | None:
        """The bfloat16 bits of 16 entries in the order of pair_levels; None for others."""
        return None if self.is_int or len(self.numbers) != 16 else pair_bits(self.numbers)

    @property
    def base(self) -> tuple[int, int]:
        """The difference of operands and numbers, for float16 and bfloat16."""
        least = -int(min(self.numbers)) if self.is_int and not self.is_split else 0
        return least, least + 128 if self.is_short else 0

    @property
    def bytes(self) -> list[int]:
        """The words of numbers relative to the least."""
        return _words([int(number) + self.base[0] for number in self.numbers])

    def halves(self, kind: str) -> list[int]:
        """The words of a split table as gpu/kernels/codebook.table takes them, for 'f16' or 'bf16'."""
        high = 0 if kind == "f16" else 0x43
        below, above = (_words([high | sign] * 4)[0] for sign in (0x80, 0))
        lower, upper = (below, above) if min(self.numbers[:8]) < 0 else (above, below)
        sizes = [abs(int(number)) for number in self.numbers]
        bits = [size | (number < 0) << 15 if kind == "f16" else bf16_bits(number)
                for size, number in zip(sizes, self.numbers, strict=True)]
        return [lower, *_words(sizes), *_words([b & 255 for b in bits]), *_words([b >> 8 for b in bits]), upper]

    def floats(self, kind: str) -> tuple[list[int], list[int]]:
        """The words of low bytes and those of high bytes, for 'f16' or 'bf16'."""
        bits = [struct.unpack("<H", struct.pack("<e", number / self.unit))[0] if kind == "f16" else bf16_bits(number)
                for number in self.numbers]
        if kind == "bf16" and self.paired:                       # the lower half's top bits are repeated over the upper half
            bits = [word ^ 0xFF * ((word & TOP_BITS) >> 7) if place >= 8 else word for place, word in enumerate(self.paired)]
        return _words([b & 255 for b in bits]), _words([b >> 8 for b in bits])


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A table of `entries` numbers stored with a weight, which kernels load and round to x's dtype.

    Or a long table of the spec, in memory in x's dtype, with float16 numbers divided by unit; unit 0 if float16 has none.
    """

    tensor: str
    rows: str                                                    # rows that share it, as a number or a size; '' for all
    entries: int
    unit: float = 1.0
    name: str = ""                                               # of the spec's table

    is_int = is_split = False
    base = (0, 0)

    @property
    def function(self) -> str:
        """The lookup function in gpu/kernels/bitplanes.py."""
        loaded = "loaded_by_bytes" if self.entries == 256 else "loaded_by_planes"
        return f"float_entries_of_{self.entries}" if self.entries <= IN_REGISTERS else loaded


def table_form(program: Program, table: str, entries: int) -> Codebook | StoredTable | None:
    """The first entries of a table; None if it has fewer, or numbers that are too far apart for float16.

    A table in memory supports such numbers in bfloat16.
    """
    numbers = program.spec.table(table).values[:entries]
    sizes = [abs(number) for number in numbers if number]
    if len(numbers) < entries or not sizes:
        return None
    unit = 2.0 ** math.frexp(max(sizes))[1]
    if entries > IN_REGISTERS:
        unit /= LARGEST
        return StoredTable("", "", entries, unit if min(sizes) / unit >= SMALLEST else 0.0, table)
    return Codebook(numbers, unit) if min(sizes) / unit >= SMALLEST else None


def _words(bytes_: Sequence[int]) -> list[int]:
    """Bytes, four to an int32."""
    return list(struct.unpack(f"<{len(bytes_) // 4}i", bytes(bytes_)))
