"""Names that a spec cannot use for fields, parameters, tables and tensors: keywords and names of generated code.

The printers take their imports from the same lists (emit/module/module.py), so that every import is reserved.
"""

from __future__ import annotations

from qdsl.core.numbers import FLOATS
from qdsl.core.ops import functions
from qdsl.core.schemes import SCHEMES

LANGUAGE = ("n", "k", "N", "K", "word", "pad", "index", "ceil", "lcm", "base3", "round", "planar", "plus", *functions())
# Imports of generated modules from qdsl.runtime and qdsl.runtime.gpu.kernels.
RUNTIME = ("Codes", "EightBit", "Format", "GroupField", "Kernels", "Levels", "MatrixUnitKernels", "Pairs", "Records", "RowCodes",
           "RowLoops", "Storage", "Sums", "Table", "Variant", "as_float", "as_type",
           "base3", "cdiv", "empty", "entries", "first_trit", "integer", "joined", "lookup", "pad", "rounded", "spread",
           "workspace")
KERNELS = ("bitplanes", "codebook", "device", "group_sums", "lanes", "records")
# Other modules, and builtins that generated code calls.
MODULES = ("torch", "triton", "tl", "qdsl", "Tensor", "Any")
BUILTINS = ("sum", "range", "int", "str", "dict", "float")
# Arguments and variables of printed functions.
LOCALS = ("x", "out", "bias", "fields", "tensors", "space", "w", "live", "inside", "sizes", "use", "state")
RESERVED = frozenset({*LANGUAGE, *RUNTIME, *KERNELS, *MODULES, *BUILTINS, *LOCALS, *SCHEMES, *FLOATS})
