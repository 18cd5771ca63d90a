"""The kernel families: one hand-written kernel each, which the short functions of a format complete.

| family | rows of x | what it is made for |
|---|---|---|
| dequantize | none | every weight in float32, rounded to the dtype of out |
| matvec | 1 at a time | any format, shape and dtype |
| gemm | any, in blocks of 16, 32 or 64 | any format, shape and GPU, by the matrix units that it has |
| gemv | 1 | groups of columns of w in the columns of the matrix instruction |
| gemv_records | 1 | the same for weights in records, as files store them |
| skinny | up to 8, blocks of 8 or 16, or 8 of each expert | rows of x in the columns of the matrix instruction |
| tile_gemm | more | warp groups of Hopper, which take w from registers and x from shared memory |
| w8a8 | any | x in 8 bits, and codes of 8 bits as files store them |

A format's functions are constants of a launch (MatrixUnitKernels in runtime/weight/layout.py), so that every format has a kernel
of its own:

- decode(tensors, n, u, live, N, K, sizes, use, state): `state` after use(state, k, w, live, row) for each weight of unit u in
  row n of tiles, for `dequantize`, `matvec` and `gemm`; `row` is left out where it is 0
- words(tensors, row, K, chunk, more): the words that hold 128 columns of two rows; bitplanes.py has them
- numbers(words, half, i, digit, to, flip, F): the numbers of some of them, as pairs; bitplanes.py has them by type of the codes
- table(g, N, F): the words of a table that codes are looked up in; a stored table's are loaded (codebook.stored_table)
- scale(fields, sum, ones, BASE, total): what a group adds up to, of its numbers, such as its scale, of the sum of its codes
  times x, and of `ones`, the sum of its x; plus `total`, unless that is None, so that additions are those of multiply-adds.
  BASE is what numbers have more than codes; None says that their zero point is off already
- finish(fields, sum, ones, BASE): the same for what all columns of a row share; group_sums.py has those that formats share

Where the numbers of groups lie and which lanes want them depends on the family, so a format never loads one.  It says which they
are, as GroupFields (runtime/weight/layout.py), and the family loads them by a `field(plane, at, rows, columns, kind)` of its own.
`rows` and `columns` share a number, all of them where that is 0; `kind` is how it is stored, as group_numbers.number takes it.
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
