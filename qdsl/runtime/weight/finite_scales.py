"""Finds NaN and infinite scales, and other numbers that weights share, fast enough for every weight that is loaded.

Tensors of floats are read whole.  Where records hold such numbers next to codes, as in GGUF files, only their bytes are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from qdsl.core.numbers import FLOATS, number
from qdsl.core.slices import FieldPiece
from qdsl.runtime.weight.arrays import as_type
from qdsl.runtime.weight.errors import FormatError
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import PackedWeight

WEIGHT = {"N", "K"}                                              # axes of the codes


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
    return _special_value_text(base.decode_streams(), kinds) if is_suspect else ""


def refuse_special_scales(packed: PackedWeight) -> PackedWeight:
    """The weight, for those who read it from a file.  Raises FormatError if a scale is NaN or infinite."""
    if error := scale_error(packed):
        raise FormatError(error)
    return packed


def _special_value_text(packed: PackedWeight, kinds: Mapping[str, str]) -> str:
    """The first number that is not finite; padding, which is no field, may hold anything."""
    tensors = map(packed.tensors.get, packed.layout.coded)
    for name, field in packed.layout.fields_of(tensors, packed.extents).items():
        special = _special_mask(field, kinds[name]) if name in kinds else None
        if special is not None and bool(special.any()):
            index = torch.nonzero(special)[0]
            value = field[tuple(index)]
            shown = float(value) if value.is_floating_point() else number(kinds[name]).decode(int(value))
            return f"'{name}' is {shown} at {index.tolist()}, and so are the weights that share it"
    return ""


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
    own = number(kind)
    return tuple(code for code in range(1 << own.bits) if not abs(own.decode(code)) < float("inf"))


def _has_special_codes(codes: Tensor, kind: str) -> bool:
    """Whether bytes have special codes; if these are the last ones below 128 and 256, the largest bytes tell, without a mask."""
    below, above = (tuple(code for code in _special_codes(kind) if (code > 127) is high) for high in (False, True))
    if below == tuple(range(128 - len(below), 128)) and above == tuple(range(256 - len(above), 256)):
        return (bool(below) and int(codes.view(torch.int8).amax()) >= below[0]) or (bool(above) and int(codes.amax()) >= above[0])
    return any(bool((codes == code).any()) for code in _special_codes(kind))


def _special_mask(field: Tensor, kind: str) -> Tensor:
    """Which numbers of a field are NaN or infinite."""
    if field.element_size() > 1:
        return ~torch.isfinite(field)
    codes = field.view(torch.uint8)
    return torch.stack([codes == code for code in (*_special_codes(kind), -1)]).any(0)


def _has_special_bytes(packed: PackedWeight, kinds: Mapping[str, str]) -> bool:
    """Whether floats within records may be NaN or infinite; True if some do not lie at strides of whole floats."""
    for name, tensor in packed.tensors.items() if packed.numel() else ():
        for piece in packed.layout.tensors[name].slices if not tensor.is_floating_point() else ():
            if piece.field in kinds:
                floats = _strided_floats(packed, name, piece, torch_dtype(kinds[piece.field]))
                if floats is None or (_has_special_codes(floats.view(torch.uint8), kinds[piece.field])
                                      if floats.element_size() == 1 else _has_special(floats)):
                    return True
    return False


def _strided_floats(packed: PackedWeight, name: str, piece: FieldPiece, dtype: torch.dtype) -> Tensor | None:
    """The floats of a field that a tensor of records holds, as a view; None if they do not lie at strides of whole floats."""
    placed, bits = packed.placed(name, piece), 8 * dtype.itemsize
    digits = [] if placed is None else [digit for coordinate in placed.coordinates for digit in coordinate]
    if placed is None or piece.width or any(at % bits for at in (placed.start, placed.size, *(step for _, step in digits))):
        return None
    flat = as_type(packed.tensors[name].flatten(), dtype)
    return flat.as_strided([extent for extent, _ in digits], [step // bits for _, step in digits],
                           flat.storage_offset() + placed.start // bits)
