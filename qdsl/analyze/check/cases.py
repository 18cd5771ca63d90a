"""The inputs of a format's checks: its storages, choices of parameters, shapes, and random fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qdsl.analyze.check import spec_bits
from qdsl.compiler.passes import compile_spec
from qdsl.compiler.spec.model import Spec
from qdsl.core.numbers import number
from qdsl.runtime.format import Format
from qdsl.runtime.weight import order
from qdsl.runtime.weight.layout import PLANAR, Storage
from qdsl.runtime.weight.match import torch_dtype

Params = Mapping[str, int | str]
Shape = tuple[int, int]
SIZES = (*range(1, 65), *(64 * i for i in range(2, 41)))         # candidates for the smallest shape
ROWS = (0, 1, 2, 3, 5, 8, 16, 33, 64)
COLUMNS = (0, 1, 7, 32, 33, 64, 90, 128, 256, 288, 512)
MOST = 12 << 10                                                  # weights per case: Triton's interpreter is slow


@dataclass(frozen=True)
class StorageCase:
    """A storage of a format at one choice of its parameters.  spec: the spec with the storage, which may be derived."""

    spec: Spec
    format: Format
    storage: str
    params: Params

    @property
    def layout(self) -> Storage:
        """The storage, with streams as plain tensors."""
        return self.format.variant(self.params).storages[self.storage].decoded

    @property
    def has_row_codes(self) -> bool:
        """Whether it stores codes that replace several of the format's fields."""
        return {field.name.value for field in self.spec.fields} != self.format.variant(self.params).fields.keys()

    def supports_shape(self, shape: Shape) -> bool:
        layout, sizes = self.layout, self.format.sizes(self.params, shape)
        return not layout.why_unsupported_shape(shape, sizes) and all(
            axis.extent(*shape, sizes) is not None for stored in layout.tensors.values() for axis in stored.axes)

    def shapes(self, rows: Sequence[int], columns: Sequence[int]) -> Iterator[Shape]:
        """The shapes of a grid that the storage supports, by rows."""
        return (shape for shape in ((n, k) for n in rows for k in columns) if self.supports_shape(shape))

    @cached_property
    def smallest(self) -> Shape | None:
        """The supported shape with the fewest columns, then rows; None if none has at most 2560 of both."""
        return next((shape for k in SIZES for shape in self.shapes(SIZES, (k,))), None)

    @cached_property
    def two_block_shape(self) -> Shape:
        """A shape with two blocks or tiles along both axes, to test strides; the smallest if there is none."""
        assert self.smallest is not None
        sizes = self.format.sizes(self.params, self.smallest)
        axes = [term for stored in self.layout.tensors.values() for axis in stored.axes for term in axis.terms]
        rows, columns = self.smallest
        n, k = (size * (max(size, *(axis.by(sizes) for axis in axes if axis.dim == dim), 1) // size + 1)
                for size, dim in zip(self.smallest, "NK", strict=True))
        return next((shape for shape in ((n, k), (rows, k), (n, columns)) if self.supports_shape(shape)), self.smallest)

    def test_shapes(self, count: int) -> list[Shape]:
        """Test shapes: the smallest, two blocks along both axes, an empty one, and `count` more of at most MOST weights."""
        assert self.smallest is not None
        shapes = [shape for shape in self.shapes(ROWS, COLUMNS) if shape[0] * shape[1] <= MOST]
        empty = [shape for shape in shapes if 0 in shape][-1:]
        others = sorted((shape for shape in shapes if 0 not in shape), key=lambda shape: (shape[0] * shape[1], shape))
        whole = [shape for shape in others if shape[1] % 256 == 0 and shape[0] <= 16][-1:]   # as matrix units need them
        steps = [others[(i + 1) * (len(others) - 1) // count] for i in range(count)] if others else []
        more = [] if len(set(steps)) > 1 else [self.two_block_shape]
        return list(dict.fromkeys([self.smallest, *empty, *steps, *whole, *more]))

    def fields(self, shape: Shape, seed: int = 0) -> dict[str, Tensor]:
        """Random values of the fields that the storage holds: all codes, and finite floats of moderate size."""
        generator = torch.Generator().manual_seed(seed)
        variant, sizes = self.format.variant(self.params), self.format.sizes(self.params, shape)
        digits = spec_bits.digit_fields(self.spec)
        fields: dict[str, Tensor] = {}
        for name, field in variant.fields.items():
            if name in variant.storages[self.storage].where:
                continue
            size = tuple(axis.rounded(*shape, sizes) for axis in field.axes)
            kind = str(self.params.get(field.type, field.type))
            if field.groups is not None:
                groups = max(1, field.groups.extent(*shape, sizes) or 1)
                fields[name] = torch.randint(0, groups, size, generator=generator, dtype=torch.int32, device="cpu")
            else:
                fields[name] = random_values(kind, size, generator, base_3=name in digits)
        return fields

    def random_perm(self, shape: Shape, seed: int = 0) -> dict[str, Tensor]:
        """A random act-order index that the storage can hold; {} if it cannot hold any."""
        variant, sizes = self.format.variant(self.params), self.format.sizes(self.params, shape)
        groups = variant.index_groups
        if not variant.storages[self.storage].order or groups is None:
            return {}
        size = groups.by(sizes)
        index = order.index_of(torch.randperm(shape[1], generator=torch.Generator().manual_seed(seed), device="cpu"), size)
        names = [name for name, field in variant.fields.items() if field.groups is not None]
        return {} if torch.equal(index, order.in_order(index, size)) else dict.fromkeys(names, index)


def random_values(kind: str, size: Sequence[int], generator: torch.Generator, base_3: bool = False) -> Tensor:
    """Random values of a number type, in the dtype of its fields; base_3: only 0, 1 and 2, which digits hold."""
    dtype = torch_dtype(kind)
    if kind in ("f16", "bf16", "f32"):
        return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    if dtype.is_floating_point:                                  # larger bytes are not finite numbers
        stop = 124 if kind == "e5m2" else 126
        return torch.randint(100, stop, size, generator=generator, dtype=torch.uint8, device="cpu").view(dtype)
    type = number(kind)
    low, count = (0 if type.is_float else int(type.low)), 3 if base_3 else 1 << type.bits
    if type.exponent == 8:                                       # powers of two whose products are finite
        low, count = type.bias - 20, 24
    return torch.randint(low, low + count, size, generator=generator, device="cpu").to(dtype)


def parameter_choices(format: Format, by: tuple[int | str, ...]) -> list[dict[str, int | str]]:
    """Parameters of a variant: all defaults, then every other value of one parameter with the defaults of the others."""
    base = format.complete(dict(zip(format.by, by, strict=True)))
    return [base, *({**base, name: value} for name, values in format.params.items() if name not in format.by
                    for value in values[1:])]


def storage_cases(spec: Spec, format: Format) -> Iterator[StorageCase]:
    """Every storage of a format, the planar one too, at every choice of its parameters."""
    derived = [program for program in compile_spec(spec) if program.storage == PLANAR]
    for by, variant in format.variants.items():
        for params in parameter_choices(format, by):
            for storage in variant.storages:
                written = [program.spec for program in derived if program.params.items() <= params.items()]
                yield StorageCase(written[0] if storage == PLANAR else spec, format, storage, params)


