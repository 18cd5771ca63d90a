"""What a kernel family tells plans and launches: which products it serves, its launch configurations, and its launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qdsl.runtime.gpu import configure, costs
from qdsl.runtime.gpu.kernels.scale_columns import scale_columns
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.libraries.triton import tl
from qdsl.runtime.weight.arrays import cdiv, power
from qdsl.runtime.weight.device_dtypes import is_float8
from qdsl.runtime.weight.matrix_unit import MatrixUnitKernels
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.target import Candidate

Config = Mapping[str, int]                                       # constants of a launch by name
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}   # dtypes of x that kernels multiply on matrix units
WARPS = 4
SECOND_AXIS = 65535                                              # limit of the grid's second axis


@dataclass(frozen=True, slots=True)
class Product:
    """x [m, K] of a dtype times a weight, on a device.  is_aligned: x and the weight are aligned for loads of 16 bytes."""

    packed: PackedWeight
    m: int
    dtype: torch.dtype
    device: torch.device
    is_aligned: bool = True


class Family(ABC):
    """A kernel family.

    name: of its kernel, and of its counts in costs.json.  use: what a program does.  absent: why it is no candidate for a product
    that it serves.
    """

    name: ClassVar[str]
    use: ClassVar[str]
    absent: ClassVar[str] = "its counts for this GPU are missing, or it spills registers"

    @abstractmethod
    def why_not(self, product: Product) -> str:
        """Why it does not serve a product; '' if it does."""

    @abstractmethod
    def configs(self, packed: PackedWeight, m: int, device: torch.device) -> list[dict[str, int]]:
        """Its configurations for x [m, K], the default one first."""

    @abstractmethod
    def grid(self, packed: PackedWeight, m: int, config: Config) -> tuple[int, ...]:
        """The grid of a launch for x [m, K]."""

    @abstractmethod
    def calls(self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, config: Config) -> Iterator[Call]:
        """The launches that write x @ w.T + bias to out, for tensors on any device, meta too."""

    def candidate(self, packed: PackedWeight, m: int, config: dict[str, int]) -> Candidate:
        return Candidate(self.name, config, self.grid(packed, m, config))

    def candidates(self, product: Product) -> list[Candidate]:
        """The candidates for a product that it serves."""
        packed, m = product.packed, product.m
        return [self.candidate(packed, m, config) for config in self.configs(packed, m, product.device)]


class MatrixUnitFamily(Family):
    """A family for NVIDIA's matrix units.  rows: the fewest and the most rows of x; 0 for any number."""

    rows: ClassVar[tuple[int, int]] = (1, 0)

    def why_not(self, product: Product) -> str:
        kernels, (least, most) = product.packed.layout.kernels.matrix_unit, self.rows
        if why := why_no_matrix_units(product):
            return why
        if kernels is None or self.name not in kernels.families:
            return "the storage has none"
        if product.m < least or (most and product.m > most):
            return "serves one row of x" if most == 1 else "serves two rows of x and more"
        return ""

    def candidates(self, product: Product) -> list[Candidate]:
        """The same, without those whose kernels spill registers."""
        arch = configure.gpu(product.device).arch
        return [way for way in super().candidates(product) if self.has_registers(way, product.packed, arch)]

    def has_registers(self, candidate: Candidate, packed: PackedWeight, arch: str) -> bool:
        """Whether no registers spill: the table has such kernels alone.  Without any: whether a program takes few rows of x."""
        if costs.counted_on(costs.storage_key(packed), self.name, arch) is not None:
            return costs.has_counts(packed, candidate, arch)
        return not candidate.config.get("SCALED") and candidate.config.get("BM", 8) <= self.rows_without_counts(packed)

    def rows_without_counts(self, packed: PackedWeight) -> int:
        """The most rows of x per program with which no format's kernel spills."""
        return 8


def distinct(configs: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """The configurations without repetitions, in order."""
    return [config for place, config in enumerate(configs) if config not in configs[:place]]


def kernels_of(packed: PackedWeight) -> MatrixUnitKernels:
    """The kernels for matrix units of a weight that has some."""
    kernels = packed.layout.kernels.matrix_unit
    assert kernels is not None
    return kernels


def why_no_matrix_units(product: Product) -> str:
    """Why no kernel for matrix units serves a product: x of 16 bits, whole chunks of columns, no NaN codes; '' if some may."""
    packed, k = product.packed, product.packed.shape[1]
    kernels = packed.layout.kernels.matrix_unit
    if kernels is None or packed.layout.streams:
        others = [name for name, other in packed.variant.storages.items() if other.kernels.matrix_unit is not None]
        return f"storage {packed.storage} has none" + (f"; {' and '.join(others)} has" if others else "")
    if not configure.has_mma(product.device):
        return "are for NVIDIA's GPUs from Ampere on"
    if product.dtype not in TYPES or (product.dtype == torch.float16 and not kernels.codes.unit[0]):
        return f"x is {str(product.dtype)[6:]}, which their numbers of codes are not"
    if not k or k % 128:
        return f"K = {k} is no multiple of 128"
    if not all(map(kernels.serves, kernels.sizes(packed.sizes))):
        return f"blocks of fewer than {kernels.least} columns"
    if not product.is_aligned:
        return "x or the weight is not aligned to 16 bytes"
    return "" if packed.finite else "some codes are NaN or infinite"


# -- arguments of launches ---------------------------------------------------------------------------------------------


def scale_x(x: Tensor, packed: PackedWeight) -> Generator[Call, None, Tensor]:
    """The launch that multiplies x [M, K] by the weight's column factor, if it has one.  Returns the scaled x."""
    name = packed.layout.factor
    factor = packed.tensors.get(name.removeprefix("/"))
    if factor is None:
        return x
    scaled, columns = torch.empty_like(x), min(1024, power(x.shape[1]))
    yield Call(scale_columns, (x, factor, scaled, x.shape[1]), {"DIVIDES": name.startswith("/"), "BK": columns},
               (x.shape[0], cdiv(x.shape[1], columns)), {"num_warps": WARPS, "enable_fp_fusion": False}, workspace=(scaled,))
    return scaled


def is_aligned(x: Tensor, packed: PackedWeight) -> bool:
    """Whether x and the tensors that matrix-unit kernels read as words are aligned for loads of 16 bytes."""
    wide = [tensor for name, tensor in packed.tensors.items()
            if tensor.dtype == torch.int32 or _is_read_as_words(name, tensor, packed)]
    return all(tensor.is_meta or (tensor.data_ptr() % 16 == 0 and tensor.storage_offset() * tensor.element_size() % 4 == 0)
               for tensor in (x, *wide))                         # torch can view the latter as words


def _is_read_as_words(name: str, tensor: Tensor, packed: PackedWeight) -> bool:
    """Whether a matrix-unit kernel reads a tensor of other elements as words: 8-bit codes, and records."""
    kernels = packed.layout.kernels.matrix_unit
    records = None if kernels is None else kernels.records
    return tensor.shape == packed.shape or (records is not None and name == records.tensor)


def lane_tensors(packed: PackedWeight) -> tuple[Tensor | None, ...]:
    """A matrix-unit kernel's tensors in storage order, 8-bit codes and records as words; and the tables of group numbers."""
    return (*(tensor if tensor is None or not _is_read_as_words(name, tensor, packed) else tensor.view(torch.int32)
              for name, tensor in zip(packed.layout.coded, kernel_tensors(packed), strict=True)),
            *(table.on(packed.device) for table in kernels_of(packed).tables))


def parts(x: Tensor, out: Tensor, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Rows of x and of out per launch.  The grid's second axis is limited; a program takes at least `rows` rows."""
    return list(zip(torch.split(x, rows * SECOND_AXIS), torch.split(out, rows * SECOND_AXIS), strict=True))


def kernel_tensors(packed: PackedWeight) -> list[Tensor | None]:
    """Kernel arguments in storage order: 8-bit floats as bytes, None for tensors that are absent or add nothing."""
    assert packed.order is None, "kernels take columns as they are stored, and x alike"
    present = (packed.tensors.get(name) if name not in packed.in_order else None for name in packed.layout.coded)
    return [tensor.view(torch.uint8) if tensor is not None and is_float8(tensor.dtype) else tensor for tensor in present]
