"""x @ w.T on a CPU, in tiles that are decoded and multiplied; compiled, if that is asked for, and then in one loop for few rows.

Compiling takes a C++ compiler and some seconds for every format and shape, so it is never done unasked: `compile_products()`,
or QDSL_CPU_COMPILE=1 in the environment.  The compiled decode makes the bits of the plain one.  Up to 8 rows of x meet exact
float32 weights in a loop that decodes, multiplies and sums at once; tiles hold weights rounded to x's dtype.  Which of the
ways is taken depends on shapes and on that choice, never on how often a product was asked for.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qdsl.core.shapes import axis
from qdsl.runtime.cpu import pieces
from qdsl.runtime.torch.private_apis import compile_program, traced
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.tiles import decode_rows, row_tiles, unpack

TILE = 1 << 21                                                   # weights decoded at a time: less, and calls cost more than work
FEW = 8                                                          # rows of x for which one loop is faster than tiles
TOGETHER = 4                                                     # rows that share a pass over the weight; one or two do not
MOST = 256                                                       # programs kept: a model has a few shapes, not hundreds
# Nothing is stored on the way: by default the compiler does so once an expression is long.
OPTIONS = dict.fromkeys(("realize_opcount_threshold", "realize_reads_threshold", "realize_acc_reads_threshold"), 1 << 20)
OPTIONS["max_pointwise_cat_inputs"] = 0                          # lanes are stored one by one, not chosen weight by weight

Compiled = Callable[..., Tensor]

_asked = os.environ.get("QDSL_CPU_COMPILE", "0") not in ("", "0")
_programs: dict[tuple[Any, ...], Compiled | None] = {}
_making = threading.Lock()


def compile_products(on: bool = True) -> None:
    """Turns compilation of products on a CPU on or off; the default is off.  Compiling takes seconds per format and shape."""
    global _asked
    _asked = on


def product(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    """x [M, K] @ w.T + bias: [M, N] in x's dtype."""
    if _is_plain(packed, x.dtype):
        return _tiled(x, packed, bias, False)
    asked = _asked and x.numel() > 0 and x.dtype != torch.float64 and not torch.compiler.is_compiling()
    if asked and x.shape[0] <= FEW:
        out = _looped(x.detach(), packed, bias)
        if out is not None:
            return out
    return _tiled(x, packed, bias, asked)


def _is_plain(packed: PackedWeight, dtype: torch.dtype) -> bool:
    """Whether the stored numbers are the weights already, in this dtype."""
    copied = packed.variant.copies
    return copied is not None and torch_dtype(str(packed.params.get(copied, packed.variant.fields[copied].type))) == dtype


def _looped(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor | None:
    """The product by compiled loops over one or four rows of x; None where this weight cannot be compiled."""
    together = TOGETHER if x.shape[0] > 2 else 1
    parts = _whole_rows(packed)
    loops = [_program(part, together) for part in parts]
    if None in loops:
        return None
    groups = torch.split(torch.nn.functional.pad(x.float(), (0, 0, 0, -x.shape[0] % together)), together)
    sums = [torch.cat([loop(rows, *part.tensors.values()) for rows in groups])
            for loop, part in zip(loops, parts, strict=True) if loop is not None]
    total = torch.cat(sums, 1)[:x.shape[0]]
    return (total if bias is None else total + bias.float()).to(x.dtype)


def _whole_rows(packed: PackedWeight) -> list[PackedWeight]:
    """The weight, or its whole blocks of rows and the short one that is left."""
    n, by = packed.shape[0], axis(packed.variant.cuts[0]).by(packed.sizes)
    whole = n // by * by
    return [packed] if whole in (0, n) else [packed.cut("N", 0, whole), packed.cut("N", whole, n)]


def _is_whole(packed: PackedWeight) -> bool:
    """Whether decode takes the weight in one piece: blocks are whole, or alone on their axis."""
    lengths = (axis(text).by(packed.sizes) for text in packed.variant.cuts)
    return all(extent % by == 0 or extent < by for extent, by in zip(packed.shape, lengths, strict=True))


def _tiled(x: Tensor, packed: PackedWeight, bias: Tensor | None, asked: bool) -> Tensor:
    """The product by tiles of decoded weights; only one tile is in memory at a time."""
    out = x.new_empty(x.shape[0], packed.shape[0])
    space = x.new_empty(0)                                       # for every tile the same: fresh pages cost more than decoding
    plain = packed.variant.copies if _is_plain(packed, x.dtype) else None
    for start, stop in row_tiles(packed, weights=TILE):
        part = packed.cut("N", start, stop)
        decode = _program(part, x.dtype) if asked else None
        if plain is not None:
            weight = unpack(part)[plain]
        elif decode is None:
            if space.shape != part.shape:
                space = x.new_empty(part.shape)
            weight = space
            decode_rows(packed, start, stop, weight)
        else:
            weight = decode(*part.tensors.values())
        out[:, start:stop] = torch.nn.functional.linear(x, weight, None if bias is None else bias[start:stop].to(x.dtype))
    return out


# -- compiled programs -------------------------------------------------------------------------------------------------


def _program(packed: PackedWeight, kind: int | torch.dtype) -> Compiled | None:
    """The compiled product with so many rows of x, or decode to a dtype, of weights of this storage, shape and strides.

    None where there is none: the format's decode has no such form for this weight, or this machine has no compiler.
    """
    stored = tuple((name, t.dtype, t.shape, t.stride(), t.storage_offset() % 16) for name, t in packed.tensors.items())
    key = (packed.format, packed.storage, tuple(packed.params.values()), packed.shape, packed.in_order, stored, kind,
           torch.get_num_threads())
    if key not in _programs:
        with _making:
            if key not in _programs and len(_programs) < MOST:
                _programs[key] = _try_compile(packed, kind)
    return _programs.get(key)


def _try_compile(packed: PackedWeight, kind: int | torch.dtype) -> Compiled | None:
    """A compiled product or decode of a weight; None where it cannot be compiled.  Warns if the machine's compiler fails."""
    if not _is_whole(packed):
        return None
    try:
        with torch.no_grad(), torch.device("cpu"), warnings.catch_warnings():          # a caller may be in torch.device("meta")
            warnings.simplefilter("ignore")                      # torch's compiler warns about itself
            tensors = [_like(tensor) for tensor in packed.tensors.values()]
            return _compiled(_Decode(packed, tensors), kind)
    except _NoCompiler as error:
        warnings.warn(f"products on this CPU are not compiled: {error}", RuntimeWarning, stacklevel=2)
    except (pieces.Unsupported, RuntimeError):
        pass                                                     # act-order, bytes at odd addresses: the plain tiles do it
    return None


class _NoCompiler(Exception):
    """The machine's compiler is missing or fails."""


def _like(tensor: Tensor) -> Tensor:
    """A tensor without values that lies in memory as this one does."""
    offset = tensor.storage_offset() % 16
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.empty(last + 1 + offset, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset)


class _Decode:
    """The unpack and decode of a weight, traced."""

    def __init__(self, packed: PackedWeight, tensors: Sequence[Tensor]) -> None:
        self.shape = packed.shape
        self.tensors = tensors
        self.along_rows = packed.layout.kernels.last == "n"
        names = list(packed.tensors)
        fields = list(unpack(packed.derive({name: t.to("meta") for name, t in zip(names, tensors, strict=True)})))
        self.unpacked = traced(
            lambda *stored: [unpack(packed.derive(dict(zip(names, stored, strict=True))))[name] for name in fields], tensors)
        self.decoded = traced(lambda *values: packed.variant.decode(**dict(zip(fields, values, strict=True))),
                               _results(self.unpacked))

    def fields(self, tensors: Sequence[Tensor]) -> list[pieces.Pieces]:
        return list(pieces.Interpreter(self.unpacked).run(*map(pieces.whole, tensors)))

    def weight(self, fields: Sequence[pieces.Pieces]) -> pieces.Pieces:
        decoded: pieces.Pieces = pieces.Interpreter(self.decoded).run(*fields)
        if not self.along_rows:
            return pieces.split_last(decoded, 1, _vector(), 8)
        return pieces.unroll_last(pieces.split_last(decoded, 0, _vector(), 16), 1, 2)

    def small(self, fields: Sequence[pieces.Pieces]) -> dict[int, tuple[pieces.Digit, ...]]:
        """Fields of groups, where a loop runs along rows: they are put in its order first.  By place, with the rows' digits."""
        n, k = self.shape
        rows = next(field.axes[0] for field in fields if field.shape == [n, k])
        return {i: rows for i, field in enumerate(fields)
                if self.along_rows and len(field.axes) == 2 and field.shape[0] == n and 4 * field.shape[1] <= k}


def _compiled(decode: _Decode, kind: int | torch.dtype) -> Compiled:
    """The compiled programs of a weight as one callable: the one that permutes small fields, if any, and the main loop."""
    k = decode.shape[1]

    def first(*tensors: Tensor) -> list[Tensor]:
        fields = decode.fields(tensors)
        return [pieces.by_rows(fields[i], rows) for i, rows in decode.small(fields).items()]

    def weight(tensors: Sequence[Tensor], ready: Sequence[Tensor]) -> pieces.Pieces:
        fields = decode.fields(tensors)
        for tensor, (i, rows) in zip(ready, decode.small(fields).items(), strict=True):
            fields[i] = pieces.from_rows(tensor, rows, fields[i])
        return decode.weight(fields)

    stored = len(decode.tensors)
    begin = traced(first, decode.tensors)
    ready = _results(begin)
    prepare = _built(begin, decode.tensors) if ready else lambda *tensors: []
    if isinstance(kind, torch.dtype):
        dtype = kind
        every = [*decode.tensors, *ready]
        finish = _built(traced(lambda *args: pieces.joined(pieces.converted(weight(args[:stored], args[stored:]), dtype)),
                                every), every)
        return lambda *tensors: finish(*tensors, *prepare(*tensors))[0]
    columns: list[pieces.Digit] = []

    def shaped(*args: Tensor) -> Tensor:
        decoded = weight(args[:stored], args[stored:])
        columns.extend(decoded.axes[1])
        return next(iter(decoded.parts.values()))

    traced(shaped, [*decode.tensors, *ready])
    every = [pieces.by_columns(torch.empty(kind, k), columns), *decode.tensors, *ready]
    loop = _built(traced(lambda x, *args: pieces.dot(x, weight(args[:stored], args[stored:])), every), every)
    return lambda x, *tensors: loop(pieces.by_columns(x, columns), *tensors, *prepare(*tensors))[0]


def _results(program: fx.GraphModule) -> list[Tensor]:
    """Tensors like those that a traced program returns."""
    returned: Any = program.graph.output_node().args[0]
    values = [node.meta["val"] for node in returned]
    return [torch.empty_strided(value.shape, value.stride(), dtype=value.dtype) for value in values]


def _built(program: fx.GraphModule, example: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compiles a traced program, which then returns a sequence.  Raises _NoCompiler."""
    node = program.graph.output_node()
    if isinstance(node.args[0], fx.Node):
        node.args = ([node.args[0]],)
        program.recompile()
    try:
        compiled: Callable[..., Sequence[Tensor]] = compile_program(program, example, OPTIONS)
    except Exception as error:
        raise _NoCompiler(str(error).strip().partition("\n")[0][:200]) from error
    return compiled


def _vector() -> int:
    """Floats in a vector register of this machine."""
    return {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
