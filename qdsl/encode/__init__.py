"""Choosing codes: the encode schemes that specs name.  Each takes a weight and returns the fields it chooses."""

from qdsl.encode.absmax import absmax, signmax
from qdsl.encode.grids import grid_shifts, grid_signs
from qdsl.encode.kmeans import kmeans, scaled_kmeans
from qdsl.encode.kquant import kquant_minmax, kquant_signmax
from qdsl.encode.least_squares import least_squares, least_squares_even, least_squares_nested
from qdsl.encode.level_search import block_levels, kquant_levels
from qdsl.encode.levels import absmax_level
from qdsl.encode.minmax import affine, edge_affine, float_middle, float_zero, minmax, scaled_zero
from qdsl.encode.nearest import meansign, nearest, ternary
from qdsl.encode.nested import nested_absmax, progressive
from qdsl.encode.units import unit_absmax, unit_level, unit_level_nested
from qdsl.encode.vectors import vector_kmeans

__all__ = ["absmax", "absmax_level", "affine", "block_levels", "edge_affine", "float_middle", "float_zero",
           "grid_shifts", "grid_signs", "kmeans", "kquant_levels", "kquant_minmax", "kquant_signmax", "least_squares",
           "least_squares_even", "least_squares_nested", "meansign", "minmax", "nearest", "nested_absmax", "progressive",
           "scaled_kmeans", "scaled_zero", "signmax", "ternary", "unit_absmax", "unit_level", "unit_level_nested",
           "vector_kmeans"]
