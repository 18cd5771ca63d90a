"""What generated modules stand on: packed weights, the functions of a format, launches.  Needs no compiler."""

from qdsl.runtime.arrays import as_float, as_type, cdiv, empty, integer, joined, pad, spread, workspace
from qdsl.runtime.base3 import base3, trit
from qdsl.runtime.format import Format, Spec
from qdsl.runtime.layers import QuantizedEmbedding, QuantizedLinear
from qdsl.runtime.layout import Field, Kernels, Lanes, Narrow, Pairs, Records, Storage, Stream, Variant
from qdsl.runtime.packed import FormatError, PackedWeight
from qdsl.runtime.requantize import Report
from qdsl.runtime.tables import Table, entries
from qdsl.stored import Stored

__all__ = ["Field", "Format", "FormatError", "Kernels", "Lanes", "Narrow", "PackedWeight", "Pairs", "QuantizedEmbedding",
           "QuantizedLinear", "Records", "Report", "Spec", "Storage", "Stored", "Stream", "Table", "Variant", "as_float",
           "as_type", "base3", "cdiv", "empty", "entries", "integer", "joined", "pad", "spread", "trit", "workspace"]
