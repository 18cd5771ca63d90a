"""Weights of random fields: small ones field by field, large ones by repeating the rows of a small one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bench.weights import DIGITS, choices, format_of
from qdsl.core.numbers import number
from qdsl.core.shapes import extents
from qdsl.runtime import PackedWeight
from qdsl.runtime.weight import stream_kernels
from qdsl.runtime.weight.match import torch_dtype

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ROWS = 256                                                       # of which a large weight consists; whole blocks and words


@dataclass(frozen=True)
class Weight:
    """Which weight: picklable, so that another process can make its launches.  optional: with tensors that may be missing."""

    name: str
    storage: str
    params: tuple[tuple[str, int | str], ...]
    shape: tuple[int, int]
    optional: bool = False

    def __str__(self) -> str:
        form = format_of(self.name)
        shown = [f"{key}={value}" for key, value in self.params if value != form.params[key][0] or key in form.by]
        return " ".join([f"{self.name}.{self.storage}", *shown, f"[{self.shape[0]}, {self.shape[1]}]",
                         *(["with optional tensors"] if self.optional else [])])

    @property
    def chosen(self) -> dict[str, int | str]:
        return dict(self.params)

    def meta(self) -> PackedWeight:
        """Without data, streams as they usually are."""
        layout = format_of(self.name).storage(self.storage, self.chosen)[1]
        optional = [key for key in layout.coded if layout.tensors[key].optional] if self.optional else []
        empty = format_of(self.name).empty(self.shape, self.storage, "meta", optional, **self.chosen)
        return stream_kernels.with_typical_streams(empty)


def every(shape: tuple[int, int] = (0, 0)) -> list[Weight]:
    """Every storage of every format, other parameters at their defaults, of a shape where the format fixes none."""
    weights = []
    for name, storage, params in choices():
        chosen = format_of(name).complete(params)
        fixed = format_of(name).variant(chosen).storages[storage].fixed
        weights.append(Weight(name, storage, tuple(chosen.items()), (fixed.get("N", shape[0]), fixed.get("K", shape[1]))))
    return weights


def fits(weight: Weight) -> bool:
    """Whether the storage can hold the shape."""
    form = format_of(weight.name)
    sizes = form.sizes(weight.chosen, weight.shape)
    layout = form.storage(weight.storage, weight.chosen)[1]
    return not layout.decoded.why_unsupported_shape(weight.shape, sizes) and all(
        extents(stored.axes, *weight.shape, sizes) is not None for stored in layout.tensors.values())


def packed(weight: Weight, seed: int = 0) -> PackedWeight:
    """The weight on the CPU: codes over their whole range, scales of 2^-9 to 2^-6 and either sign, nothing infinite."""
    form = format_of(weight.name)
    variant = form.variant(weight.chosen)
    layout = variant.storages[weight.storage]
    generator = torch.Generator().manual_seed(seed)
    fields: dict[str, Tensor] = {}
    for key, field in variant.fields.items():
        if key in layout.where or (key in variant.defaults and not weight.optional):
            continue
        sizes = form.sizes(weight.chosen, weight.shape)
        shape = extents(field.axes, *weight.shape, sizes)
        assert shape is not None
        kind = str(weight.chosen.get(field.type, field.type))
        groups = (field.groups.extent(*weight.shape, sizes) if field.groups else None) or 1
        fields[key] = _values(kind, shape, groups, generator)
    if weight.name in DIGITS:
        fields[DIGITS[weight.name]] %= 3
    return form.pack(fields, storage=weight.storage, **weight.chosen)


def _values(kind: str, shape: tuple[int, ...], groups: int, generator: torch.Generator) -> Tensor:
    if kind == "index":
        return torch.randint(0, groups, shape, generator=generator, dtype=torch.int32)
    if kind in DTYPES:
        size = 2.0 ** (-9 + 3 * torch.rand(shape, generator=generator))
        return (size * (1 - 2 * torch.randint(0, 2, shape, generator=generator))).to(DTYPES[kind])
    dtype = torch_dtype(kind)
    number_type = number(kind)
    if number_type.exponent == 8:                                # powers of two, 2^-9 to 2^-6 too
        low, high = number_type.bias - 9, number_type.bias - 5
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8).view(dtype)
    if dtype.is_floating_point:
        code = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        return torch.where(code.view(dtype).float().isfinite(), code, 0).view(dtype)
    return torch.randint(int(number_type.low), int(number_type.high) + 1, shape, generator=generator).to(dtype)


def large(weight: Weight, device: torch.device | str) -> PackedWeight:
    """The weight on a device: ROWS random rows, repeated there in the order of its words; of a stream normal ones, coded whole.

    Its rows are a multiple of ROWS, or fewer.
    """
    n, k = weight.shape
    rows = min(n, ROWS)
    assert n % rows == 0
    layout = format_of(weight.name).storage(weight.storage, weight.chosen)[1]
    if layout.streams:
        return _coded(weight, rows).to(device)
    packed_rows = _rows(Weight(weight.name, weight.storage, weight.params, (rows, k), weight.optional))
    if layout.whole:                                             # its words hold rows of all of it
        return _repeated(packed_rows, n // rows).to(device)
    wanted = weight.meta()
    tensors = {}
    for key, tensor in packed_rows.tensors.items():
        whole = wanted.tensors[key].shape
        tensors[key] = tensor.to(device).repeat([more // few for few, more in zip(tensor.shape, whole, strict=True)])
        assert tensors[key].shape == whole
    return packed_rows.derive(tensors, weight.shape)


@lru_cache(maxsize=64)
def _rows(weight: Weight) -> PackedWeight:
    """Shapes of one K share their rows."""
    return packed(weight)


def _repeated(packed_rows: PackedWeight, count: int) -> PackedWeight:
    """A weight of the same rows several times."""
    axes = {name: field.axes for name, field in packed_rows.variant.fields.items()}
    fields = {name: values.repeat([count if axis.dim != "K" else 1 for axis in axes[name]]) if axes[name] else values
              for name, values in packed_rows.format.unpack(packed_rows).items()}
    return packed_rows.format.pack(fields, storage=packed_rows.storage, **packed_rows.params)


def _coded(weight: Weight, rows: int) -> PackedWeight:
    """A weight whose size depends on its numbers: standard deviation 0.02."""
    params: dict[str, Any] = weight.chosen
    some = normal(rows, weight.shape[1])
    return format_of(weight.name).quantize(some.repeat(weight.shape[0] // rows, 1), weight.storage, **params)


def normal(rows: int, columns: int) -> Tensor:
    """The rows of which a large weight in a stream consists."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)


def clones(packed: PackedWeight, count: int) -> list[PackedWeight]:
    """The weight and copies of it, each in memory of its own."""
    return [packed, *(packed.apply(torch.clone) for _ in range(count - 1))]
