"""The kernel families: one hand-written kernel each, completed by short functions of a format.

| family | rows of x | use |
|---|---|---|
| dequantize | none | every weight in float32, rounded to the dtype of out |
| matvec | 1 at a time | any format, shape and dtype |
| gemm | any, in blocks of 16, 32 or 64 | any format, shape and GPU, by the matrix units that it has |
| gemv | 1 | groups of columns of w are the columns of the MMA |
| gemv_records | 1 | the same for weights in records, as files store them |
| skinny | up to 8, blocks of 8 or 16, or 8 of each expert | rows of x are the columns of the MMA |
| tile_gemm | more | tiles of w decoded once for all rows of x, which come from shared memory |
| w8a8 | any | 8-bit x and 8-bit codes as files store them |

A format's functions are constants of a launch (runtime/weight/matrix_unit.py), so that every format has a kernel
of its own:

- decode(tensors, n, u, live, N, K, sizes, use, state): `state` after use(state, k, w, live, row) for each weight of unit u in
  row n of tiles, for `dequantize`, `matvec` and `gemm`; `row` is left out where it is 0
- words(tensors, row, K, chunk, more): the words of 128 columns of two rows; defined in bitplanes.py
- numbers(words, half, i, digit, to, flip, F): pairs of codes of these words as numbers; bitplanes.py has one per code type
- table(g, N, F): the words of the lookup table of codes; those of a stored table are loaded (codebook.stored_table)
- scale(fields, sum, ones, BASE, total): a group's share of the result, plus `total` unless that is None, in multiply-adds.
  fields: the group's numbers, such as its scale.  sum: codes times x.  ones: the sum of x.  BASE: the difference of numbers
  and codes; None if the zero point was already subtracted
- finish(fields, sum, ones, BASE): the same for fields that all columns of a row share; group_sums.py has the common ones

The lanes that need a group's numbers depend on the family, so a format never loads numbers.  It lists them as GroupFields
(runtime/weight/layout.py), and the family loads them by its own `field(plane, at, rows, columns, kind)`.  A number is shared by
`rows` rows and `columns` columns, by all if that is 0; `kind` is how it is stored (group_numbers.number).
"""

from qdsl.runtime.gpu.kernels.dequantize import dequantize
from qdsl.runtime.gpu.kernels.gemm import gemm
from qdsl.runtime.gpu.kernels.gemv import gemv
from qdsl.runtime.gpu.kernels.gemv_records import gemv_records
from qdsl.runtime.gpu.kernels.matvec import matvec
from qdsl.runtime.gpu.kernels.skinny import skinny
from qdsl.runtime.gpu.kernels.tile_gemm import tile_gemm
from qdsl.runtime.gpu.kernels.w8a8 import w8a8

__all__ = ["dequantize", "gemm", "gemv", "gemv_records", "matvec", "skinny", "tile_gemm", "w8a8"]
