"""Choosing codes: the encode schemes that specs name.  Each takes a weight and returns the fields it chooses."""

from qdsl.encode.absmax import absmax, signmax
from qdsl.encode.kquant import kquant_minmax, kquant_signmax
from qdsl.encode.minmax import affine, minmax
from qdsl.encode.nearest import meansign, nearest

__all__ = ["absmax", "affine", "kquant_minmax", "kquant_signmax", "meansign", "minmax", "nearest", "signmax"]
