"""x @ w.T and decoded weights on a CPU: the target of plans (runtime/weight/target.py) that lists ways, chooses one and runs it.

| way      | for                              | what computes it                                                                |
| dense    | lossless codes, x in their dtype | torch's matmul of a decoded copy (dense.py)                                     |
| stored   | stored numbers that are weights  | torch's matmul                                                                  |
| rows     | any number of rows               | compiled loops over a copy with interleaved rows (rows.py)                      |
| plain    | up to 8 rows of x                | a compiled loop over the weight as it is stored; exact float32 weights           |
| decode   | any number of rows               | a compiled loop decodes tiles, rounded to x's dtype, that torch multiplies       |
| int8     | up to 64 rows, no compiler       | torch's kernel for int8 codes with a scale per row, x in bfloat16                |
| tiles    | everything                       | torch decodes tiles, rounded to x's dtype, and multiplies them                   |

The first way of the table that a weight has is chosen.  QDSL_CPU_COMPILE says which weights have compiled loops: 'auto', the
default, those of 2^16 numbers and more; 'always' all; 'never' none.  A format's loop is compiled at its first product, which
waits for that; the cache folder keeps it for all shapes and all processes.  The compiled decode makes the bits of the plain one.
The choice depends on the weight, on shapes and on settings, never on how often a product was asked for.  A layer reads settings
when it multiplies x of a shape and dtype for the first time; `compile_products` has it read them again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from qdsl.host import library
from qdsl.runtime.cpu import dense, loops
from qdsl.runtime.cpu import rows as row_copies
from qdsl.runtime.cpu.prepared import PreparedProduct, prepare
from qdsl.runtime.cpu.source import DECODE
from qdsl.runtime.cpu.threads import one_thread
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.products import forget_products, keep
from qdsl.runtime.weight.target import Candidate, plan_of
from qdsl.runtime.weight.tiles import decode_rows, row_tiles, unpack

ROUNDING = "QDSL_CPU_INT8"
TILE = 1 << 20                                                   # weights decoded at a time: more leave caches, less need calls
PLAIN, ROWS, DENSE = "plain", "rows", "dense"                    # prepared ways: as stored, interleaved rows, decoded once
INT8_ROWS = 64                                                   # of x, for which torch's int8 kernel is faster than tiles


def compile_products(on: bool = True) -> None:
    """Compile products on a CPU, of small weights too, or none; until it is called, QDSL_CPU_COMPILE decides."""
    library.choose("always" if on else "never")
    forget_products()


def has_torch_kernels() -> bool:
    """Whether torch has vector kernels for quantized weights and x in bfloat16 on this processor."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


def candidates(packed: PackedWeight, rows: int, dtype: torch.dtype) -> list[Candidate]:
    """All ways to multiply x [rows, K] of a dtype on this machine, the chosen one first.  Compiles the loops among them."""
    return list(_candidates(packed, rows, dtype))


def make_ready(weights: Iterable[PackedWeight], dtype: torch.dtype, tasks: Iterable[Callable[[], object]] = ()) -> None:
    """Compile the loops of products with x of a dtype, those of several formats at once, and make copies of weights.

    Without it the first product with each weight does.  tasks: what makes copies of some weights together, first.
    """
    by_kind: dict[tuple[object, ...], PackedWeight] = {}
    by_place: dict[tuple[object, ...], PackedWeight] = {}
    for packed in weights:
        if packed.device.type == "cpu" and loops.are_compiled(packed):
            dtypes = [tensor.dtype for tensor in packed.tensors.values()]
            by_kind.setdefault((packed.format, packed.storage, packed.params_text, *dtypes), packed)
            by_place.setdefault((packed.shape, *[tensor.data_ptr() for tensor in packed.tensors.values()]), packed)
    count = torch.get_num_threads()
    with one_thread(), ThreadPoolExecutor(count, "qdsl-copy", partial(torch.set_num_threads, 1)) as pool:
        for _ in pool.map(partial(_compile_ways, dtype=dtype), by_kind.values()):
            pass
        copies = [partial(copy, packed) for packed in by_place.values()
                  for copy in (row_copies.interleaved_copy, dense.kept_decoded)]
        for _ in pool.map(lambda task: task(), [*tasks, *copies]):
            pass


def _compile_ways(packed: PackedWeight, dtype: torch.dtype) -> None:
    """Compile the loops that multiply few rows of x, and many."""
    for rows in (1, 2 * loops.FEW):
        next(_candidates(packed, rows, dtype))


def lower(candidate: Candidate, packed: PackedWeight) -> str:
    """The C source of a candidate's loop; '' if torch alone computes it."""
    if candidate.kind == "decode":
        return loops.source_for(packed, DECODE).text
    if candidate.kind == ROWS:
        return row_copies.interleaved_source(packed)
    return loops.source_for(packed, candidate.config["ROWS"]).text if candidate.kind == PLAIN else ""


def run(candidate: Candidate, x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [M, K] @ w.T + bias by a candidate for M rows and x's dtype: [M, N]."""
    return runner(candidate, x, packed, bias)()


def runner(candidate: Candidate, x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Callable[[], Tensor]:
    """A function that computes `run`, as often as it is called, with what a layer prepares once done before."""
    if candidate.kind not in (ROWS, PLAIN, DENSE):
        of_torch = {"decode": _product_by_loop_tiles, "int8": _int8_product, "tiles": _product_by_tiles,
                    "stored": _product_by_tiles}[candidate.kind]
        return partial(of_torch, x, packed.decode_streams(), bias)
    ready = _prepare_candidate(candidate, x, packed, bias)
    names = [name for name in packed.layout.coded if name in packed.tensors and name not in packed.in_order]
    tensors = [packed.tensors[name] for name in names]

    def computed() -> Tensor:
        out = None if ready is None else ready.run(x, tensors, bias)
        return _product_by_tiles(x, packed.decode_streams(), bias) if out is None else out

    return computed


def has_decoded_copy(x: Tensor, packed: PackedWeight) -> bool:
    """Whether `product` takes a weight of a lossless code as it is, because it keeps the weight decoded."""
    if not packed.layout.streams or not x.numel() or {x.device.type, packed.device.type} != {"cpu"}:
        return False
    return not torch.compiler.is_compiling() and _is_plain(packed, x.dtype) and dense.kept_decoded(packed) is not None


def product(x: Tensor, packed: PackedWeight, bias: Tensor | None, mode: str | None = None) -> Tensor:
    """x [M, K] @ w.T + bias by the chosen candidate: [M, N].  Raises FormatError for an unknown QDSL_CPU_COMPILE.

    mode: keep the product, if a loop computes it, for `quick` in this mode; None: do not.
    """
    if not x.numel() or x.device.type != "cpu" or torch.compiler.is_compiling():
        return _product_by_tiles(x, packed, bias)
    candidate = next(_candidates(packed, x.shape[0], x.dtype))
    if mode is not None and candidate.kind in (ROWS, PLAIN, DENSE):
        plan = plan_of(packed)
        ready = _prepare_candidate(candidate, x, packed, bias, plan.is_permuted)
        if ready is not None:
            keep(plan, x, bias, mode, ready)
    return run(candidate, x, packed, bias)


def _candidates(packed: PackedWeight, rows: int, dtype: torch.dtype) -> Iterator[Candidate]:
    """Candidates, the best first."""
    if _is_plain(packed, dtype):
        if dense.kept_decoded(packed) is not None:
            yield Candidate(DENSE)
        yield Candidate("stored")
        return
    packed = packed.decode_streams()
    if loops.are_compiled(packed) and dtype != torch.float64:
        together = loops.TOGETHER if rows > 2 else 1
        rounds_x = rows <= loops.FEW and os.environ.get(ROUNDING, "0") not in ("", "0")
        has_copy = row_copies.interleaved_copy(packed) is not None
        if rounds_x and has_copy and row_copies.takes_bytes(packed):
            yield Candidate(ROWS, {"INT8": 1})
        if has_copy:
            yield Candidate(ROWS)
        if rows <= loops.FEW and loops.find_loop(packed, together) is not None:
            yield Candidate(PLAIN, {"ROWS": together})
        if loops.find_loop(packed, DECODE) is not None:
            yield Candidate("decode")
    if _takes_torch_int8(packed, rows, dtype):
        yield Candidate("int8")
    yield Candidate("tiles")


def _prepare_candidate(candidate: Candidate, x: Tensor, packed: PackedWeight, bias: Tensor | None,
                       is_permuted: bool = False) -> PreparedProduct | None:
    kind = None if bias is None else bias.dtype
    if candidate.kind == DENSE:
        return dense.prepare_dense(packed, x.shape[0], kind, is_permuted)
    if candidate.kind == ROWS:
        return row_copies.prepare(packed, x.shape[0], x.dtype, kind, is_permuted, "INT8" in candidate.config)
    return prepare(packed, candidate.config["ROWS"], x.shape[0], x.dtype, kind, is_permuted)


def _is_plain(packed: PackedWeight, dtype: torch.dtype) -> bool:
    """Whether the stored numbers are the weights already, in this dtype."""
    copied = packed.variant.copies
    return copied is not None and torch_dtype(str(packed.params.get(copied, packed.variant.fields[copied].type))) == dtype


def _product_by_loop_tiles(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    """The product by tiles that a compiled loop decodes."""
    out = x.new_empty(x.shape[0], packed.shape[0])
    for start, weight in loops.decoded_tiles(packed) or ():
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
    decode = loops.row_decoder(packed)
    if decode is not None and out.dtype == torch.float32 and out.is_contiguous():
        decode(out, 0)
        return True
    for start, weight in loops.decoded_tiles(packed) or ():
        out[start:start + len(weight)].copy_(weight)
    return True


def _takes_torch_int8(packed: PackedWeight, rows: int, dtype: torch.dtype) -> bool:
    """Whether torch's kernel for int8 codes with a scale per row takes the weight and x.

    Its vectors are for bfloat16 alone.  They read 16 columns at once, those behind the end of a row too; from an address of x
    that is no multiple of 32, or of codes no multiple of 16, that ends the process.  Places are 32-bit integers.
    """
    if dtype != torch.bfloat16 or not 0 < rows <= INT8_ROWS or packed.shape[1] % 16 or not has_torch_kernels():
        return False
    return loops.are_compiled(packed) and not library.has_compiler() and _int8_rows(packed) is not None


def _int8_product(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    """The product by torch's kernel for int8 codes with a scale per row; see _takes_torch_int8."""
    rows = _int8_rows(packed)
    assert rows is not None, "only weights with int8 codes have this candidate"
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


def _product_by_tiles(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    """The product by torch, by tiles that it decodes, of which one is in memory at a time."""
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
