"""The kernel families: one hand-written kernel each, which the short functions of a format complete.

| family | rows of x | what it is made for |
|---|---|---|
| dequantize | none | every weight in float32, rounded to the dtype of out |
| matvec | 1 at a time | any format, shape and dtype |
| gemv | 1 | groups of columns of w in the columns of the matrix instruction |
| gemv_records | 1 | the same for weights in records, as files store them |
| skinny | up to 8, or 8 of each expert | rows of x in the columns of the matrix instruction |
| tile_gemm | more | warp groups of Hopper, which take w from registers and x from shared memory |
| w8a8 | any | x in 8 bits, and codes of 8 bits as files store them |

A format's functions are constants of a launch (runtime/layout.Lanes holds them), so that every format has a kernel of its own:

- decode(tensors, n, u, live, N, K, sizes, use, state): `state` after use(state, k, w, live, row) for each weight of unit u in
  row n of tiles, for `dequantize` and `matvec`; `row` is left out where it is 0
- words(tensors, row, K, chunk, more): the words that hold 128 columns of two rows; bitplanes.py has them
- numbers(words, half, i, digit, to, flip, F): the numbers of some of them, as pairs; bitplanes.py has them by type of the codes
- table(g, N, F): the words of a table that codes are looked up in
- fields(tensors, at, field, SIZES): the numbers of a group of columns, such as its scale
- scale(fields, sum, ones, BASE): what the group adds up to, of the sum of its codes times x and `ones`, the sum of its x.
  BASE is what numbers have more than codes; None says that their zero point is off already
- finish(tensors, sum, ones, at, field, SIZES, BASE): the same for what all columns of a row share
- point(tensors, at, field, SIZES): the zero point of a group

Where a number lies and which lanes want it depends on the family, so a format never loads one itself.  It calls
`field(plane, at, rows, columns, kind)`, which the family supplies with the place `at`: one `fields` serves them all.  `rows` and
`columns` share a value, all of them where that is 0; `kind` is how it is stored, as lanes.number takes it.
"""

from qdsl.runtime.gpu.kernels.dequantize import dequantize
from qdsl.runtime.gpu.kernels.gemv import gemv
from qdsl.runtime.gpu.kernels.gemv_records import gemv_records
from qdsl.runtime.gpu.kernels.matvec import matvec
from qdsl.runtime.gpu.kernels.skinny import skinny
from qdsl.runtime.gpu.kernels.tile_gemm import tile_gemm
from qdsl.runtime.gpu.kernels.w8a8 import w8a8

__all__ = ["dequantize", "gemv", "gemv_records", "matvec", "skinny", "tile_gemm", "w8a8"]
