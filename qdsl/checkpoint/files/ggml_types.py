"""The tensor types of GGUF files: numbers, names, and the size of a block of each."""

from __future__ import annotations

from dataclasses import dataclass


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


_TABLE = """
 0 F32       1   4
 1 F16       1   2
 2 Q4_0     32  18
 3 Q4_1     32  20
 6 Q5_0     32  22
 7 Q5_1     32  24
 8 Q8_0     32  34
 9 Q8_1     32  36
10 Q2_K    256  84
11 Q3_K    256 110
12 Q4_K    256 144
13 Q5_K    256 176
14 Q6_K    256 210
15 Q8_K    256 292
16 IQ2_XXS 256  66
17 IQ2_XS  256  74
18 IQ3_XXS 256  98
19 IQ1_S   256  50
20 IQ4_NL   32  18
21 IQ3_S   256 110
22 IQ2_S   256  82
23 IQ4_XS  256 136
24 I8        1   1
25 I16       1   2
26 I32       1   4
27 I64       1   8
28 F64       1   8
29 IQ1_M   256  56
30 BF16      1   2
31 Q4_0_4_4 32  18
32 Q4_0_4_8 32  18
33 Q4_0_8_8 32  18
34 TQ1_0   256  54
35 TQ2_0   256  66
39 MXFP4    32  17
40 NVFP4    64  36
41 Q1_0    128  18
42 Q2_0     64  18
"""
# Types of ik_llama.cpp, with the bytes ahead of a row.
_IK_TABLE = """
137 IQ2_K  256 76 0
138 IQ3_K  256 110 0
139 IQ4_K  256 144 0
140 IQ5_K  256 176 0
144 IQ4_KS 256 136 4
146 IQ4_KSS 256 128 4
202 Q4_0_R8   32  18 0
220 IQ4_NL_R4 32  18 0
"""

TYPES = {type.id: type for type in (GgmlType(int(id), name, *map(int, sizes))
                                    for id, name, *sizes in map(str.split, (_TABLE.strip() + _IK_TABLE).splitlines()))}
BY_NAME = {type.name: type for type in TYPES.values()}
REMOVED = {4: "Q4_2", 5: "Q4_3", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}

# Types whose elements are numbers of torch's own, and what torch calls them.
TORCH = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
         "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"}
WEIGHTLESS = ("F64", "I8", "I16", "I32", "I64")                   # what is stored in these is no weight


def type_of(id: int) -> GgmlType:
    """The type with a number; a removed or unknown one has blocks of 0 elements, and a name that says so."""
    return TYPES[id] if id in TYPES else GgmlType(id, f"removed {REMOVED[id]}" if id in REMOVED else f"unknown {id}", 0, 0)
