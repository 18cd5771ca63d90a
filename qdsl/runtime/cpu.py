"""x @ w.T on a CPU: tiles that are decoded and multiplied, and for few rows of x a loop that does both at once.

The loop is made by torch's own compiler from what the format's `unpack` and `decode` do, so it needs a C++ compiler and takes
seconds to make.  It is therefore asked for: `compile_products()`, or QDSL_CPU_COMPILE=1 in the environment.  Weights are
exact float32 in it; in the tiles they are rounded to x's dtype first.  Which of the two is taken depends on the shapes and
on that choice, never on how often it was called.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from qdsl.runtime import lanes
from qdsl.runtime.packed import PackedWeight
from qdsl.runtime.tiles import decode_rows, row_tiles, unpack

TILE = 1 << 18                                                   # weights decoded at a time: a cache's worth
FEW = 8                                                          # rows of x for which the loop is the faster one
AT_ONCE = (4, 1)                                                 # rows of x that one pass over the weight serves
MOST = 256                                                       # loops kept: a model has a few shapes, not hundreds
# Nothing is stored on the way: by default the compiler does so once an expression is long.
OPTIONS = dict.fromkeys(("realize_opcount_threshold", "realize_reads_threshold", "realize_acc_reads_threshold"), 1 << 20)

Loop = Callable[..., Any]

_asked = os.environ.get("QDSL_CPU_COMPILE", "0") not in ("", "0")
_loops: dict[tuple[Any, ...], Loop | None] = {}
_making = threading.Lock()


def compile_products(on: bool = True) -> None:
    """Whether products with few rows of x are compiled, a few seconds for each new shape; off unless asked for."""
    global _asked
    _asked = on


def product(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    """x [M, K] @ w.T + bias: [M, N] in x's dtype."""
    if _asked and 0 < x.shape[0] <= FEW and x.dtype != torch.float64 and not torch.compiler.is_compiling():
        found = _fused(x, packed, bias)
        if found is not None:
            return found
    return _tiled(x, packed, bias)


def _tiled(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    out = x.new_empty(x.shape[0], packed.shape[0])
    for start, stop in row_tiles(packed, weights=TILE):
        weight = torch.empty(stop - start, packed.shape[1], dtype=x.dtype, device=x.device)
        decode_rows(packed, start, stop, weight)
        out[:, start:stop] = torch.nn.functional.linear(x, weight, None if bias is None else bias[start:stop].to(x.dtype))
    return out


# -- the loop ----------------------------------------------------------------------------------------------------------


def _fused(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor | None:
    """The product by compiled loops; None where there is none for this weight."""
    wide = x.float()
    parts: list[Tensor] = []
    tensors = list(packed.tensors.values())
    start = 0
    while start < x.shape[0]:
        rows = next(count for count in AT_ONCE if count <= x.shape[0] - start)
        loop = _loop(packed, rows)
        if loop is None:
            return None
        found = loop(wide[start:start + rows], *tensors)
        parts.append(found[0] if isinstance(found, (list, tuple)) else found)
        start += rows
    total = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (total if bias is None else total + bias.float()).to(x.dtype)


def _loop(packed: PackedWeight, rows: int) -> Loop | None:
    """The compiled product of so many rows of x with weights of this storage, shape and strides."""
    stored = tuple((name, tensor.dtype, *tensor.shape, *tensor.stride()) for name, tensor in packed.tensors.items())
    key = (packed.format, packed.storage, tuple(packed.params.items()), packed.shape, packed.in_order, stored, rows,
           torch.get_num_threads())
    if key not in _loops:
        with _making:
            if key not in _loops and len(_loops) < MOST:
                _loops[key] = _made(packed, rows)
    return _loops.get(key)


def _made(packed: PackedWeight, rows: int) -> Loop | None:
    """Trace, rewrite, compile; None, and a warning where that is the machine's fault, if it cannot be."""
    names = tuple(packed.tensors)
    x = torch.empty(rows, packed.shape[1])
    example = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in packed.tensors.values()]

    def weight(*tensors: Tensor) -> Tensor:
        part = packed.derive(dict(zip(names, tensors, strict=True)))
        return packed.variant.decode(**unpack(part))

    try:
        with torch.no_grad():
            traced = make_fx(weight, tracing_mode="fake")(*example)

            def loop(x: Tensor, *tensors: Tensor) -> Tensor:
                found = lanes.Interpreter(traced).run(*map(lanes.whole, tensors))
                return lanes.dot(x, lanes.split_columns(found, _vector()))

            program = make_fx(loop, tracing_mode="fake")(x, *example)
    except (lanes.Unsupported, RuntimeError):
        return None                                              # blocks that are cut short, act-order: the tiles do it
    try:
        compiled: Loop = torch._inductor.compile(program, [x, *example], options=OPTIONS)
    except Exception as error:
        warnings.warn(f"products on this CPU are not compiled, but decoded tile by tile: {str(error).strip()[:200]}",
                      RuntimeWarning, stacklevel=2)
        return None
    return compiled


def _vector() -> int:
    """Floats in a vector register of this machine."""
    return {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
