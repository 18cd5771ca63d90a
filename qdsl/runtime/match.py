"""Which storage, parameters and shape a checkpoint's tensors are, and what is wrong when they are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qdsl.numbers import number
from qdsl.runtime.layout import FLOATS, INTEGERS, Storage, Stored, Variant
from qdsl.runtime.packed import FormatError
from qdsl.runtime.shapes import extents

if TYPE_CHECKING:
    from qdsl.runtime.format import Format


@dataclass(frozen=True, slots=True)
class Match:
    """One way to read the tensors; `as_stored` if none of them had all its axes run together, as some packages do."""

    storage: str
    params: Mapping[str, int | str]
    shape: tuple[int, int]
    tensors: Mapping[str, Tensor]
    as_stored: bool


@dataclass(frozen=True, slots=True)
class Miss:
    """Why one way failed, and how far it came; the farthest is what the author of the tensors meant."""

    reached: int
    message: str


def matches(format: Format, tensors: Mapping[str, Tensor], shape: tuple[int, int] | None, storage: str | None,
            given: Mapping[str, int | str]) -> list[Match]:
    """Every way to read the tensors.  Raises FormatError with the reason of the nearest miss where there is none."""
    found: list[Match] = []
    misses: list[Miss] = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise FormatError(f"'{name}' is a {type(tensor).__name__}, not a torch tensor")
    for variant, name, choice in _candidates(format, storage, given):
        label = f"{format.name}.{name}" + "".join(f" {key}={value}" for key, value in choice.items())
        result = _match(format, variant, name, label, tensors, shape, {**given, **choice})
        if isinstance(result, Miss):
            misses.append(result)
        else:
            found += result
    if not found:
        nearest = max(misses, key=lambda miss: miss.reached, default=Miss(0, f"{format.name} has no storage '{storage}' here"))
        raise FormatError(nearest.message)
    return [match for match in found if match.as_stored] or found


def torch_dtype(kind: str) -> torch.dtype:
    """The torch dtype of a field: codes up to 8 bits and floats that torch lacks are bytes, wider codes and indices int32."""
    known = number(kind)
    if kind in FLOATS or known is None or known.bits > 8:
        return FLOATS.get(kind, torch.int32)
    return torch.int8 if known.kind == "signed" else torch.uint8


def stored_dtype(kind: str) -> torch.dtype:
    """The torch dtype of a stored tensor's elements."""
    return INTEGERS.get(kind) or torch_dtype(kind)


def _candidates(format: Format, storage: str | None, given: Mapping[str, int | str],
                ) -> Iterator[tuple[Variant, str, dict[str, int | str]]]:
    for key, variant in format.variants.items():
        choice = dict(zip(format.by, key, strict=True))
        if all(given.get(name, value) == value for name, value in choice.items()):
            for name in variant.storages:
                if storage in (None, name):
                    yield variant, name, choice


def _match(format: Format, variant: Variant, storage: str, label: str, tensors: Mapping[str, Tensor],
           shape: tuple[int, int] | None, given: Mapping[str, int | str]) -> list[Match] | Miss:
    layout = variant.storages[storage]
    named = _named(layout, tensors)
    missing = [name for name, stored in layout.tensors.items() if not stored.optional and name not in named]
    if missing:
        return Miss(0, f"{label} needs tensor '{missing[0]}'; given are {', '.join(tensors) or 'none'}")
    typed = _typed(format, layout, label, named, given)
    if isinstance(typed, Miss):
        return typed
    chosen, named = typed
    solved = shape or _solve(layout, label, named)
    if isinstance(solved, Miss):
        return solved
    fits: list[Match] = []
    closest = Miss(0, "")
    for sizes in _size_choices(format, chosen):
        whole = format.sizes({**chosen, **sizes}, solved)
        shaped = _shaped(layout, label, named, solved, whole)
        if isinstance(shaped, Miss):
            closest = max(closest, shaped, key=lambda miss: miss.reached)
        else:
            alike = all(_squeezed(shaped[name].shape) == _squeezed(tensor.shape) for name, tensor in named.items())
            fits.append(Match(storage, format.complete({**chosen, **sizes}), solved, shaped, alike))
    return fits or closest


def _named(layout: Storage, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The storage's tensors under their own names."""
    found: dict[str, Tensor] = {}
    for name, stored in layout.tensors.items():
        key = next((key for key in (name, *stored.aliases) if key in tensors), None)
        if key is not None:
            found[name] = tensors[key]
    return found


def _typed(format: Format, layout: Storage, label: str, named: Mapping[str, Tensor], given: Mapping[str, int | str],
           ) -> tuple[dict[str, int | str], dict[str, Tensor]] | Miss:
    """Parameters that dtypes decide, and the tensors in their own dtypes (8-bit floats may come as raw bytes)."""
    chosen = dict(given)
    typed: dict[str, Tensor] = {}
    for name, tensor in named.items():
        kind = layout.tensors[name].dtype
        kinds = [str(chosen[kind])] if kind in chosen else [str(v) for v in format.params.get(kind, (kind,))]
        fit = [k for k in kinds if tensor.dtype == stored_dtype(k)] or \
            [k for k in kinds if tensor.dtype == torch.uint8 and stored_dtype(k).itemsize == 1 and k in FLOATS]
        if not fit:
            wanted = " or ".join(str(stored_dtype(k))[6:] for k in kinds)
            return Miss(1, f"{label}: tensor '{name}' has dtype {str(tensor.dtype)[6:]}; the format needs {wanted}")
        if kind in format.params:
            chosen[kind] = fit[0]
        typed[name] = tensor.view(stored_dtype(fit[0])) if tensor.dtype != stored_dtype(fit[0]) else tensor
    return chosen, typed


def _solve(layout: Storage, label: str, named: Mapping[str, Tensor]) -> tuple[int, int] | Miss:
    """N and K from the axes that decide them."""
    dims: dict[str, tuple[int, str]] = {}
    for name, tensor in named.items():
        axes = layout.tensors[name].axes
        if tensor.dim() != len(axes):
            continue
        for each, extent in zip(axes, tensor.shape, strict=True):
            value = each.solve(extent)
            if value is None or each.dim not in ("N", "K"):
                continue
            known, by = dims.setdefault(each.dim, (value, name))
            if known != value:
                return Miss(2, f"{label}: '{by}' {list(named[by].shape)} says {each.dim} = {known}, but '{name}' "
                               f"{list(tensor.shape)} is [{_text(layout.tensors[name])}], so {each.dim} = {value}")
    if missing := [dim for dim in ("N", "K") if dim not in dims]:
        shown = ", ".join(f"'{name}' {list(tensor.shape)} is [{_text(layout.tensors[name])}]" for name, tensor in named.items())
        return Miss(1, f"{label}: the tensors do not say what {' and '.join(missing)} are ({shown}); give shape=(N, K)")
    return dims["N"][0], dims["K"][0]


def _size_choices(format: Format, given: Mapping[str, int | str]) -> Iterator[dict[str, int | str]]:
    names = [name for name in format.size_axes if name not in given]
    for values in product(*(format.params[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _shaped(layout: Storage, label: str, named: Mapping[str, Tensor], shape: tuple[int, int], sizes: Mapping[str, int],
            ) -> dict[str, Tensor] | Miss:
    """The tensors in exactly the storage's shapes."""
    found: dict[str, Tensor] = {}
    for reached, (name, tensor) in enumerate(named.items()):
        stored = layout.tensors[name]
        wanted = extents(stored.axes, *shape, sizes)
        if wanted is None:
            bad = next(a for a in stored.axes if a.extent(*shape, sizes) is None)
            return Miss(2, f"{label}: {bad.dim} = {shape[bad.dim == 'K']} must be a multiple of {bad.by(sizes)}")
        if _squeezed(tensor.shape) not in (_squeezed(wanted), _squeezed((prod(wanted),))):
            shown = "".join(f", {key} = {value}" for key, value in sizes.items())
            return Miss(3 + reached, f"{label}: tensor '{name}' has shape {list(tensor.shape)}; the format needs "
                                     f"[{_text(stored)}] = {list(wanted)} for N = {shape[0]}, K = {shape[1]}{shown}")
        found[name] = tensor.reshape(wanted)
    return found


def _squeezed(shape: Sequence[int]) -> list[int]:
    """Without axes of one element, which packages drop and add; some run all axes together."""
    return [extent for extent in shape if extent != 1]


def _text(stored: Stored) -> str:
    return ", ".join(each.text for each in stored.axes)
