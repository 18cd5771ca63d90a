"""x @ w.T and decoded weights on a CPU: compiled loops where this machine has a C compiler, else torch, tile by tile.

QDSL_CPU_COMPILE says which weights have compiled loops: 'auto', the default, those of 2^16 numbers and more; 'always' all;
'never' none.  A format's loop is compiled at its first product, which waits for that; the cache folder keeps it for all shapes
and all processes.  The compiled decode makes the bits of the plain one.  Up to 8 rows of x meet exact float32 weights in a loop
that decodes, multiplies and sums at once; tiles hold weights rounded to x's dtype.  Without a compiler, torch's own kernel
multiplies x in bfloat16 with int8 codes that have a scale per row, also exactly, if the weight would be compiled.  The choice
depends on the weight, on shapes and on that setting, never on how often a product was asked for.

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
INT8_ROWS = 64                                                   # of x, for which torch's int8 kernel is faster than tiles


def compile_products(on: bool = True) -> None:
    """Compile products on a CPU, of small weights too, or none; until it is called, QDSL_CPU_COMPILE decides."""
    library.choose("always" if on else "never")


def has_torch_kernels() -> bool:
    """Whether torch has vector kernels for quantized weights and x in bfloat16 on this processor."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


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


def _int8_product(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor | None:
    """The product by torch's kernel for int8 codes with a scale per row; None where the weight or x is not as that takes them.

    Its vectors are for bfloat16 alone.  They read 16 columns at once, those behind the end of a row too; from an address of x
    that is no multiple of 32, or of codes no multiple of 16, that ends the process.  Places are 32-bit integers.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or not 0 < x.numel() <= INT8_ROWS * x.shape[1] or x.shape[1] % 16 \
            or not has_torch_kernels() or torch.compiler.is_compiling():
        return None
    if not loops.are_compiled(packed) or library.has_compiler() or (rows := _int8_rows(packed)) is None:
        return None
    x, out = _aligned(x, 32), x.new_empty(x.shape[0], packed.shape[0])
    for start, stop in row_tiles(packed, weights=TILE):          # codes in a mapped file may lie at any address
        codes, scales = _aligned(rows[0][start:stop], 16), rows[1][start:stop]
        out[:, start:stop] = torch.ops.aten._weight_int8pack_mm(x, codes, scales)
    return out if bias is None else (out.float() + bias.float()).to(x.dtype)


def _aligned(tensor: Tensor, size: int) -> Tensor:
    """The tensor, contiguous and at a multiple of `size` bytes; a copy where it is not."""
    is_whole = tensor.is_contiguous() and tensor.data_ptr() % size == 0
    return tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)


def _int8_rows(packed: PackedWeight) -> tuple[Tensor, Tensor] | None:
    """Codes int8 [N, K] and scales bfloat16 [N] whose product is the weight, if it is stored so; None for others."""
    variant = packed.variant
    stored = [[axis.text for axis in tensor.axes] for tensor in packed.layout.tensors.values() if tensor.dtype == "i8"]
    if ["N", "K"] not in stored or variant.scheme != "absmax" or "offset" in variant.settings:
        return None
    fields = unpack(packed)
    codes, scales = (fields.pop(variant.roles[role]) for role in ("code", "scale"))
    narrow = scales.to(torch.bfloat16)
    is_exact = codes.dtype == torch.int8 and scales.is_floating_point() and torch.equal(narrow.to(scales.dtype), scales)
    return (codes, narrow.expand(packed.shape[0]).contiguous()) if is_exact and scales.dim() < 2 and not fields else None


def _tiled(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    """The product by torch: by its kernel for int8 codes, else by tiles that it decodes, of which one is in memory at a time."""
    if (product := _int8_product(x, packed, bias)) is not None:
        return product
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
