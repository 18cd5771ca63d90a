"""The runtime of generated modules: packed weights, the functions of a format, kernel launches.  Needs no compiler."""

from qdsl.runtime.format import Format
from qdsl.runtime.torch.layers import QuantizedEmbedding, QuantizedLinear
from qdsl.runtime.weight.arrays import as_float, as_type, cdiv, empty, integer, joined, pad, rounded, spread, workspace
from qdsl.runtime.weight.base3 import base3, first_trit
from qdsl.runtime.weight.layout import Kernels, Pairs, RowLoops, Storage, Variant
from qdsl.runtime.weight.matrix_unit import Codes, EightBit, GroupField, Levels, MatrixUnitKernels, Records, Sums
from qdsl.runtime.weight.packed import FormatError, PackedWeight
from qdsl.runtime.weight.requantize import Report
from qdsl.runtime.weight.row_codes import RowCodes
from qdsl.runtime.weight.spec import Spec
from qdsl.runtime.weight.tables import Table, entries, lookup

__all__ = ["Codes", "EightBit", "Format", "FormatError", "GroupField", "Kernels", "Levels", "MatrixUnitKernels",
           "PackedWeight", "Pairs", "QuantizedEmbedding", "QuantizedLinear", "Records", "Report", "RowCodes", "RowLoops",
           "Spec", "Storage", "Sums", "Table", "Variant", "as_float", "as_type", "base3", "cdiv",
           "empty", "entries", "first_trit", "integer", "joined", "lookup", "pad", "rounded", "spread", "workspace"]
