"""Finds NaN and infinite scales, and other numbers that weights share, fast enough for every weight that is loaded.

Tensors of floats are read whole.  Where records hold such numbers next to codes, as in GGUF files, only their bytes are read:
unpack, applied to records whose bytes count from 1, shows where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from qdsl.core.numbers import FLOATS, Number, number
from qdsl.runtime.weight.arrays import as_type
from qdsl.runtime.weight.errors import FormatError
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import PackedWeight

LARGEST = 1 << 14                                                # bytes of a record that is probed
WEIGHT = {"N", "K"}                                              # axes of the codes


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes [start, start + size) of every record of `record` bytes of a tensor hold floats of this kind, one after another."""

    tensor: str
    record: int
    start: int
    size: int
    kind: str


def scale_error(packed: PackedWeight) -> str:
    """Says which scale, or other number that weights share, is NaN or infinite; '' if all are finite, and on meta.

    On a GPU it waits for the answer.
    """
    base = packed.base if packed.has_branch else packed
    if any(tensor.is_meta for tensor in packed.tensors.values()):
        return ""
    for name in packed.tensors.keys() - base.tensors.keys():     # of a branch
        if packed.tensors[name].is_floating_point() and _has_special(packed.tensors[name]):
            return f"tensor '{name}' has numbers that are NaN or infinite"
    kinds = {name: kind for name, field in base.variant.fields.items() if {axis.text for axis in field.axes} != WEIGHT
             for kind in [str(base.params.get(field.type, field.type))] if kind in FLOATS}
    floats = [tensor for name, tensor in base.tensors.items() if tensor.is_floating_point()
              and {axis.text for axis in base.layout.tensors[name].axes} != WEIGHT]
    is_suspect = any(map(_has_special, floats)) or (len(floats) < len(kinds) and _has_special_bytes(base, kinds))
    return _error(base.decode_streams(), kinds) if is_suspect else ""


def refuse_special_scales(packed: PackedWeight) -> PackedWeight:
    """The weight, for those who read it from a file.  Raises FormatError if a scale is NaN or infinite."""
    if error := scale_error(packed):
        raise FormatError(error)
    return packed


def _error(packed: PackedWeight, kinds: Mapping[str, str]) -> str:
    """The first number that is not finite; padding, which is no field, may hold anything."""
    for name, field in _fields(packed, packed.tensors).items():
        special = _special(field, kinds[name]) if name in kinds else None
        if special is not None and bool(special.any()):
            index = torch.nonzero(special)[0]
            value = field[tuple(index)]
            shown = float(value) if value.is_floating_point() else number_of(kinds[name]).decode(int(value))
            return f"'{name}' is {shown} at {index.tolist()}, and so are the weights that share it"
    return ""


def number_of(kind: str) -> Number:
    """The number type of a field of floats."""
    type = number(kind)
    assert type is not None
    return type


def _fields(packed: PackedWeight, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return packed.layout.fields_of([tensors.get(name) for name in packed.layout.coded], packed.extents)


def _has_special(tensor: Tensor) -> bool:
    """Whether any number of a tensor of floats is NaN or infinite."""
    if not tensor.numel():
        return False
    if tensor.element_size() == 1:
        return _has_special_codes(tensor.view(torch.uint8), next(kind for kind in FLOATS if torch_dtype(kind) == tensor.dtype))
    least, largest = tensor.aminmax()
    return not bool(torch.isfinite(least) & torch.isfinite(largest))


@cache
def _special_codes(kind: str) -> tuple[int, ...]:
    """The codes of an 8-bit float that are NaN or infinite."""
    own = number_of(kind)
    return tuple(code for code in range(1 << own.bits) if not abs(own.decode(code)) < float("inf"))


def _has_special_codes(codes: Tensor, kind: str) -> bool:
    """Whether bytes have special codes; if these are the last ones below 128 and 256, the largest bytes tell, without a mask."""
    below, above = (tuple(code for code in _special_codes(kind) if (code > 127) is high) for high in (False, True))
    if below == tuple(range(128 - len(below), 128)) and above == tuple(range(256 - len(above), 256)):
        return (bool(below) and int(codes.view(torch.int8).amax()) >= below[0]) or (bool(above) and int(codes.amax()) >= above[0])
    return any(bool((codes == code).any()) for code in _special_codes(kind))


def _special(field: Tensor, kind: str) -> Tensor:
    """Which numbers of a field are NaN or infinite."""
    if field.element_size() > 1:
        return ~torch.isfinite(field)
    codes = field.view(torch.uint8)
    return torch.stack([codes == code for code in (*_special_codes(kind), -1)]).any(0)


def _has_special_bytes(packed: PackedWeight, kinds: Mapping[str, str]) -> bool:
    """Whether floats within records may be NaN or infinite; True if their places are not known."""
    if not packed.shape[0] * packed.shape[1]:
        return False
    key = (packed.format.name, packed.storage, *packed.params.items(), *packed.tensors)
    if key not in _places:
        try:
            _places[key] = _find_places(packed, kinds)
        except FormatError:                                      # unpack refuses some codes
            _places[key] = None
    places = _places[key]
    return places is None or any(_has_special_at(packed.tensors[place.tensor], place) for place in places)


_places: dict[tuple[object, ...], list[Place] | None] = {}


def _has_special_at(tensor: Tensor, place: Place) -> bool:
    records = as_type(tensor.flatten(), torch.uint8)
    if len(records) % place.record:
        return True
    if number_of(place.kind).bits == 8:
        return _has_special_codes(records.view(-1, place.record)[:, place.start:place.start + place.size], place.kind)
    dtype = torch_dtype(place.kind)
    if place.record % dtype.itemsize or place.start % dtype.itemsize:
        return _has_special(as_type(records.view(-1, place.record)[:, place.start:place.start + place.size], dtype))
    first, count = place.start // dtype.itemsize, place.size // dtype.itemsize
    return _has_special(as_type(records, dtype).view(-1, place.record // dtype.itemsize)[:, first:first + count])


def _find_places(packed: PackedWeight, kinds: Mapping[str, str]) -> list[Place] | None:
    """Where the records of a storage hold floats; None if unpack does more than copy their bytes, or records are long."""
    for dim in ("N", "K"):
        packed = packed.cut(dim, 0, packed.step(dim))
    bytes_of = {name: tensor.numel() * tensor.element_size() for name, tensor in packed.tensors.items()
                if not tensor.is_floating_point() and packed.layout.tensors[name].dtype not in ("index", "shape")}
    if sum(bytes_of.values()) > LARGEST:
        return None
    starts = dict(zip(bytes_of, accumulate(bytes_of.values(), initial=1), strict=False))
    low, high = (_probe(packed, kinds, {name: _count(starts[name], size) >> shift & 255 for name, size in bytes_of.items()})
                 for shift in (0, 8))
    numbers = torch.Generator("cpu").manual_seed(0)
    drawn = {name: torch.randint(256, (size,), generator=numbers, dtype=torch.int32, device="cpu")
             for name, size in bytes_of.items()}
    check, every = _probe(packed, kinds, drawn), torch.cat([torch.zeros(1, dtype=torch.int32, device="cpu"), *drawn.values()])
    places: list[Place] = []
    for field in low:
        source = (low[field].int() | high[field].int() << 8).flatten()
        if not bool(source.any()):                               # a tensor of floats holds it
            continue
        if int(source.max()) >= len(every) or not torch.equal(every[source].to(torch.uint8), check[field].flatten()):
            return None
        for start, stop in _runs(source):
            name = max((own for own in starts if starts[own] <= start), key=lambda own: starts[own])
            places.append(Place(name, bytes_of[name], start - starts[name], stop - start, kinds[field]))
    return places


def _count(start: int, size: int) -> Tensor:
    return torch.arange(start, start + size, dtype=torch.int32, device="cpu")


def _probe(packed: PackedWeight, kinds: Mapping[str, str], bytes_of: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The bytes of the fields of floats that unpack makes of these bytes of tensors; other tensors are 0."""
    tensors = {name: torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in packed.tensors.items()}
    tensors |= {name: data.to(torch.uint8).view(packed.tensors[name].dtype).view(packed.tensors[name].shape)
                for name, data in bytes_of.items()}
    return {name: as_type(field.flatten(), torch.uint8) for name, field in _fields(packed, tensors).items()
            if name in kinds}


def _runs(source: Tensor) -> Iterator[tuple[int, int]]:
    """The runs of consecutive bytes, of any order: [start, stop)."""
    ordered = sorted(set(source.tolist()))
    start = 0
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or ordered[place] != ordered[place - 1] + 1:
            yield ordered[start], ordered[place - 1] + 1
            start = place
