"""x @ w.T and decoded weights on a CPU: compiled loops where this machine has a C compiler, else torch, tile by tile.

QDSL_CPU_COMPILE says which weights have compiled loops: 'auto', the default, those of 2^16 numbers and more; 'always' all;
'never' none.  A format's loop is compiled at its first product, which waits for that; the cache folder keeps it for all shapes
and all processes.  The compiled decode makes the bits of the plain one.  Up to 8 rows of x meet exact float32 weights in a loop
that decodes, multiplies and sums at once; tiles hold weights rounded to x's dtype.  Which of the ways is taken depends on
shapes and on that choice, never on how often a product was asked for.

QDSL_CPU_INT8=1 rounds up to 8 rows of x to 8 bits, with a scale for every 32 columns, where weights are codes with scales.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from qdsl.host import library
from qdsl.runtime.cpu import loops
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.tiles import decode_rows, row_tiles, unpack

ROUNDING = "QDSL_CPU_INT8"
TILE = 1 << 20                                                   # weights decoded at a time: more leave caches, less need calls


def compile_products(on: bool = True) -> None:
    """Compile products on a CPU, of small weights too, or none; until it is called, QDSL_CPU_COMPILE decides."""
    library.choose("always" if on else "never")


def product(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    """x [M, K] @ w.T + bias: [M, N] in x's dtype.  Raises FormatError for an unknown QDSL_CPU_COMPILE."""
    if _is_plain(packed, x.dtype) or not _is_compiled(x, packed):
        return _tiled(x, packed, bias)
    if x.shape[0] <= loops.FEW:
        out = loops.product(x.detach(), packed, True) if os.environ.get(ROUNDING, "0") not in ("", "0") else None
        out = loops.product(x.detach(), packed) if out is None else out
        if out is not None:
            return (out if bias is None else out + bias.float()).to(x.dtype)
    out = _compiled_tiles(x, packed, bias)
    return _tiled(x, packed, bias) if out is None else out


def _is_compiled(x: Tensor, packed: PackedWeight) -> bool:
    """Whether the product is to be compiled, as the setting and the shapes say."""
    return loops.are_compiled(packed) and x.numel() > 0 and x.dtype != torch.float64 and x.device.type == "cpu" \
        and not torch.compiler.is_compiling()


def _is_plain(packed: PackedWeight, dtype: torch.dtype) -> bool:
    """Whether the stored numbers are the weights already, in this dtype."""
    copied = packed.variant.copies
    return copied is not None and torch_dtype(str(packed.params.get(copied, packed.variant.fields[copied].type))) == dtype


def _compiled_tiles(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor | None:
    """The product by tiles that a compiled loop decodes; None where the weight has none."""
    tiles = loops.decoded_tiles(packed)
    if tiles is None:
        return None
    out = x.new_empty(x.shape[0], packed.shape[0])
    for start, weight in tiles:
        stop = start + len(weight)
        part = None if bias is None else bias[start:stop].to(x.dtype)
        out[:, start:stop] = torch.nn.functional.linear(x, weight.to(x.dtype), part)
    return out


def decode_into(packed: PackedWeight, out: Tensor) -> bool:
    """Write a weight to out [N, K] by a compiled loop; False where that is not wanted, or is no faster than torch."""
    if {packed.device.type, out.device.type} != {"cpu"} or torch.compiler.is_compiling():
        return False
    if not (loops.are_compiled(packed) and library.has_compiler() and loops.has_vectors(packed)):
        return False
    decode = loops.decode(packed)
    if decode is not None and out.dtype == torch.float32 and out.is_contiguous():
        decode(out, 0)
        return True
    for start, weight in loops.decoded_tiles(packed) or ():
        out[start:start + len(weight)].copy_(weight)
    return True


def _tiled(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    """The product by tiles that torch decodes; only one tile is in memory at a time."""
    out = x.new_empty(x.shape[0], packed.shape[0])
    space = x.new_empty(0)                                       # for every tile the same: fresh pages cost more than decoding
    plain = packed.variant.copies if _is_plain(packed, x.dtype) else None
    for start, stop in row_tiles(packed, weights=TILE):
        if plain is not None:
            weight = unpack(packed.cut("N", start, stop))[plain]
        else:
            if space.shape != (stop - start, packed.shape[1]):
                space = x.new_empty(stop - start, packed.shape[1])
            weight = space
            decode_rows(packed, start, stop, weight)
        out[:, start:stop] = torch.nn.functional.linear(x, weight, None if bias is None else bias[start:stop].to(x.dtype))
    return out
