"""The entropy codes that may hold a tensor's elements, each registered here once.

The compiler reads this table.  The folder qdsl/codecs/NAME implements a code: reference.py in numpy, launch.py on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

UNKNOWN = "?"                                                    # an extent that depends on the weights


@dataclass(frozen=True, slots=True)
class Codec:
    """tensors: those of the code, each with element type and axes of N and K.  flat: elements are [N * K], else [N, K].

    bits: per element, if constant; 0 if it depends on the weights.  normal: bits per element for exponents of normally
    distributed weights (measured by `python -m bench --only lossless`).
    """

    summary: str
    tensors: Mapping[str, tuple[str, tuple[str, ...]]]
    flat: bool = False
    bits: int = 0
    normal: float = 0


class StreamError(ValueError):
    """A stream that cannot be written in a format, or tensors of a file that are not such a stream."""


@cache
def implementation(code: str, module: str = "reference") -> Any:
    """A module of an entropy code, imported at its first use: most formats have no streams."""
    return import_module(f"qdsl.codecs.{code}.{module}")


@cache
def exponents() -> Any:
    """The module that splits bfloat16 weights into exponents and other bits, and joins and counts them."""
    return import_module("qdsl.codecs.exponents")


CODECS = {
    "window": Codec("4 bits, the distance from a base, and a list of the elements that are further away",
                    {"codes": ("i32", ("N", "ceil(K/8)")), "base": ("u8", ("1",)), "start": ("i32", (UNKNOWN,)),
                    "index": ("i32", (UNKNOWN,)), "value": ("u8", (UNKNOWN,))}, bits=4),
    "row_window": Codec("3 bits, the distance from a base of the row, and a list of the elements that are further away",
                        {"codes": ("i32", ("N", "2*ceil(K/32)")), "upper": ("i32", ("N", "ceil(K/32)")), "base": ("i16", ("N",)),
                         "start": ("i32", (UNKNOWN,)), "column": ("i16", (UNKNOWN,)), "value": ("u8", (UNKNOWN,))}, normal=3.3),
    "huffman_lanes": Codec("a canonical Huffman code of at most 8 bits, in lanes that are decoded side by side",
                           {"words": ("i32", (UNKNOWN,)), "starts": ("i32", (UNKNOWN, UNKNOWN)), "table": ("i16", ("256",))},
                           normal=2.8),
    "huffman_windows": Codec("a Huffman code of at most 32 bits, in windows of 64 bits that say where their first code begins",
                             {"tables": ("u8", (UNKNOWN, "256")), "data": ("u8", (UNKNOWN,)), "positions": ("u8", (UNKNOWN,)),
                             "gaps": ("u8", (UNKNOWN,))}, flat=True, normal=2.8),
}
