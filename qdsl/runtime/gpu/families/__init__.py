"""The kernel families of products, each registered here once.

To add one: a kernel in gpu/kernels, a class like these, and its row here; one for matrix units also needs what a storage says to
it, which compiler/emit/triton/matrix_unit.py prints.
"""

from qdsl.runtime.gpu.families.family import Family, MatrixUnitFamily
from qdsl.runtime.gpu.families.lanes import Gemv, Skinny, TileGemm
from qdsl.runtime.gpu.families.units import Gemm, Matvec
from qdsl.runtime.gpu.families.w8a8 import has_quantized as has_quantized
from qdsl.runtime.gpu.families.w8a8 import quantized_calls as quantized_calls

BY_EXPERTS = Skinny()                                            # for any number of rows, which may belong to experts
MATRIX_UNIT: tuple[MatrixUnitFamily, ...] = (Gemv(), BY_EXPERTS, TileGemm())
ANY_GPU, ANY_PRODUCT = Gemm(), Matvec()
FAMILIES: tuple[Family, ...] = (*MATRIX_UNIT, ANY_GPU, ANY_PRODUCT)
BY_NAME = {family.name: family for family in FAMILIES}
