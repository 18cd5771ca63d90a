"""Choosing codes: the encode schemes that specs name.  Each takes a weight and returns the fields it chooses."""

from qdsl.encode.absmax import absmax, signmax
from qdsl.encode.minmax import minmax
from qdsl.encode.nearest import nearest

__all__ = ["absmax", "minmax", "nearest", "signmax"]
