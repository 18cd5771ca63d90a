"""Weights to measure with: random, and the same in every process."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from qdsl.core import places
from qdsl.core.numbers import number
from qdsl.core.shapes import extents
from qdsl.runtime import PackedWeight
from qdsl.runtime.format import Format
from qdsl.runtime.weight.layout import PLANAR
from qdsl.runtime.weight.match import torch_dtype

SHAPE = (4096, 4096)
DIGITS = {"tq1_0": "q"}                                          # fields of 2 bits that are digits of base 3
WEIGHTS = SHAPE[0] * SHAPE[1]
F32_BYTES = 4 * WEIGHTS                                          # of a dequantized weight in float32
BF16_BYTES = 2 * WEIGHTS                                         # of the weight before it was quantized


def format_of(name: str) -> Format:
    """A format that ships with qdsl, by its name."""
    form: Format = importlib.import_module(f"qdsl.generated.{name}").FORMAT
    return form


def storages() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every storage of checkpoints that takes weights of SHAPE, at the first choice of parameters that it has."""
    seen = set()
    for name, storage, params in choices():
        form = format_of(name)
        fixed = form.variant(form.complete(params)).storages[storage].fixed
        fits = {"N": SHAPE[0], "K": SHAPE[1], **fixed} == {"N": SHAPE[0], "K": SHAPE[1]}
        if fits and storage != PLANAR and (name, storage) not in seen:
            seen.add((name, storage))
            yield name, storage, params


def choices() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every storage, planar too, and choice of the parameters that shape the bits; other parameters at their defaults."""
    for path in places.shipped():
        form = format_of(path.stem)
        for key, variant in form.variants.items():
            for storage in variant.storages:
                yield path.stem, storage, dict(zip(form.by, key, strict=True))


def title(name: str, storage: str, params: dict[str, Any]) -> str:
    """A storage in a row of the table: parameters, and the storage's name where the format has several."""
    chosen = [f"{key}={value}" for key, value in params.items()]
    several = len(set(format_of(name).storages) - {PLANAR}) > 1
    return " ".join([name, *chosen, *([storage] if several else [])])


def titled(titles: Iterable[str]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Storages with their titles.  Raises KeyError for a title that no storage has."""
    by_title = {title(*storage): storage for storage in storages()}
    return ((what, *by_title[what]) for what in titles)


def floats(dtype: torch.dtype = torch.float32) -> Tensor:
    """A weight [N, K] as a model has it: normal, of standard deviation 0.02."""
    torch.manual_seed(0)
    return (torch.randn(SHAPE) * 0.02).to(dtype)


def packed(name: str, storage: str | None = None, **params: Any) -> PackedWeight:
    """A weight of random fields; those that may be missing are."""
    form = format_of(name)
    chosen = form.complete(params)
    variant = form.variant(chosen)
    torch.manual_seed(0)
    fields = {}
    for key, field in variant.fields.items():
        if key not in variant.defaults:
            shape = extents(field.axes, *SHAPE, form.sizes(chosen, SHAPE))
            assert shape is not None
            fields[key] = _field(str(chosen.get(field.type, field.type)), shape)
    if name in DIGITS:
        fields[DIGITS[name]] %= 3
    return form.pack(fields, storage=storage, **chosen)


def _field(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Codes over the whole range of a type, powers of two around one, normal floats."""
    number_type = number(kind)
    if number_type.is_float and torch_dtype(kind) == torch.uint8:
        codes = (0, 1 << number_type.bits) if number_type.mantissa else (number_type.bias - 4, number_type.bias + 4)
        return torch.randint(*codes, shape, dtype=torch.uint8)
    if number_type.is_float:
        return torch.randn(shape).to(torch_dtype(kind))
    return torch.randint(int(number_type.low), int(number_type.high) + 1, shape, dtype=torch_dtype(kind))
