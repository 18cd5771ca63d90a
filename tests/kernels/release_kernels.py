"""Kernels compiled with another release of Triton: `PYTHONPATH=FOLDER:. python -m tests.kernels.release_kernels [ARCH [HOW]]`.

FOLDER holds the release.  Launches are made for a GPU that is not there, and go through Triton's own launcher.  Of all launches
of all storages these are compiled:

    few      that call between them every function of the runtime, and have every kind of syntax; to Triton's first IR, the last
             thing that its language decides (the default)
    pairs    that do so in each family
    whole    the few, to machine code

Prints what fails; exit code 1 if anything does.
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
import triton

from bench.gpu.ahead import AbsentDriver
from qdsl.analyze.gpus import GPUS, Arch, arch_of
from qdsl.kv_cache import cache_launches as kv_launch
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import configure, launch, plan, strides
from qdsl.runtime.gpu.branch_launches import csr_call
from qdsl.runtime.gpu.costs import Candidate
from qdsl.runtime.gpu.expert_tiles import tile_call
from qdsl.runtime.gpu.families import ANY_GPU, BY_NAME
from qdsl.runtime.gpu.families.units import gemm_config
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.torch import experts
from qdsl.runtime.weight import stream_kernels
from tests.kernels import kv_caches
from tests.support.covering import kernels
from tests.support.formats import Case, cases, shapes, smallest

META, HALVES = torch.device("meta"), (torch.bfloat16, torch.float16)
GRID = (256, 64, 128, 96, 4096), (1024, 512, 2048, 768, 4096)
SYNTAX = (ast.operator, ast.cmpop, ast.unaryop, ast.IfExp, ast.ListComp, ast.GeneratorExp, ast.Tuple, ast.Starred, ast.Subscript,
          ast.Slice, ast.For, ast.While, ast.Return)
LANES = {"gemv": 1, "skinny": 8, "tile_gemm": 16}
# Kernels that a release cannot compile for a GPU: its passes fail on pointers that are integers.
FAILING = {("3.6.0", "gfx942"): {"hlane dequantize", "hlane symbols"}}


class Stopped(Exception):
    """Triton's first IR is there."""


# -- which --------------------------------------------------------------------------------------------------------------


def covering(launches: Sequence[tuple[str, Call]], in_pairs: bool) -> list[tuple[str, Call]]:
    """Launches that have between them every feature of any; in_pairs: in each family."""
    features = [features_of(call, in_pairs) for _, call in launches]
    left, chosen = set().union(*features), list[tuple[str, Call]]()
    while left:
        best = max(range(len(launches)), key=lambda place: len(features[place] & left))
        chosen.append(launches[best])
        left -= features[best]
    return chosen


def features_of(call: Call, in_pairs: bool) -> set[tuple[str, str]]:
    """What a launch's kernel calls, and which syntax that has; which arguments are missing, and which branches are taken."""
    constants = call.constants
    flags = [f"{name} {constants.get(name)}" for name in ("F", "GAPS", "LARGE", "DIVIDES", "R", "BM", "AXIS")]
    flags += [f"{name} above 1" for name in ("SPLIT", "ROWS", "UNROLL", "GROUP") if constants.get(name, 1) > 1]
    planes = list(call.arguments[0]) if isinstance(call.arguments[0], tuple) else []
    if None in planes:                                           # constants in tuples behind a None were lost once
        behind = planes[planes.index(None):]
        are_constant = any(isinstance(plane, tuple) and 1 in plane[1:] for plane in behind)
        flags += [f"a tensor is missing, GAPS {constants.get('GAPS')}, before constants {are_constant}"]
    functions = [call.kernel, *(value for value in flat(tuple(constants.values())) if hasattr(value, "fn"))]
    used = frozenset().union(*(names(function.fn) for function in functions))
    return {(call.family, flag) for flag in flags} | {(call.family if in_pairs else "", name) for name in used}


def flat(value: Any) -> list[Any]:
    """An argument's elements, those of tuples one by one."""
    return [part for element in value for part in flat(element)] if isinstance(value, tuple) else [value]


@cache
def names(function: FunctionType) -> frozenset[str]:
    """Of a function and all that it calls: names of those of the runtime and of Triton's language, and kinds of syntax."""
    used, seen, left = set[str](), set[FunctionType](), [function]
    while left:
        if (plain := left.pop()) not in seen:
            seen.add(plain)
            own, called = _own_names(plain)
            used |= own
            left += called
    return frozenset(used)


@cache
def _own_names(function: FunctionType) -> tuple[set[str], list[FunctionType]]:
    scope, used, called = function.__globals__, set[str](), list[FunctionType]()
    if function.__module__.startswith("qdsl.runtime"):
        used.add(function.__qualname__)
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        target = scope.get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(node, ast.Attribute):
            holder = scope.get(node.value.id) if isinstance(node.value, ast.Name) else None
            target = getattr(holder, node.attr, None)
            used |= set() if hasattr(target, "fn") else {node.attr}
        elif isinstance(node, SYNTAX):
            used.add(type(node).__name__)
        called += [target.fn] if hasattr(target, "fn") else []
    return used, called


# -- launches -----------------------------------------------------------------------------------------------------------


def of_weights() -> Iterator[tuple[str, Call]]:
    """Every family that serves a storage, x in either type by turns; of weights with all tensors, and of parts, too."""
    for turn, (case, layout) in enumerate(_cases_with_new_names()):
        n, k = next(shapes(case, *GRID), smallest(case))
        optional = [name for name in layout.coded if layout.tensors[name].optional]
        whole = case.module.FORMAT.empty((n, k), case.storage, "meta", (), **case.choice)
        yield from _titled(case, of_weight(whole, turn))
        if optional:
            filled = case.module.FORMAT.empty((n, k), case.storage, "meta", optional, **case.choice)
            yield from _titled(f"{case} with all tensors", of_weight(filled, turn + 1))
        if (part := part_of(whole)) is not None:
            yield from _titled(f"{case} in part", of_weight(part, turn + 1))


def _cases_with_new_names() -> Iterator[tuple[Case, Any]]:
    """Cases and layouts, but for those whose kernels call nothing in a family that earlier ones do not."""
    seen: set[tuple[str, str]] = set()
    for case in cases():
        layout = case.module.FORMAT.variant(case.choice).storages[case.storage]
        optional = [layout.tensors[name].optional for name in layout.coded]
        own = {("layout", f"{layout.kernels.last} {layout.kernels.divides} {layout.kernels.sums > 1}"),
               ("optional", str(optional))}
        for kind in ("matvec", *LANES):
            for part in kernels(case, kind):
                own |= {(kind, name) for name in ([part] if isinstance(part, str) else names(part.fn))}
        if not layout.streams and own - seen:
            seen |= own
            yield case, layout


def _titled(title: object, calls: Iterator[Call]) -> Iterator[tuple[str, Call]]:
    return ((f"{title} {call.family}", call) for call in calls)


def part_of(packed: PackedWeight) -> PackedWeight | None:
    """Columns of a weight, which kernels read where they lie; None where it has no such part."""
    step = math.lcm(packed.step("K"), 128) if packed.shape[1] > 128 else packed.shape[1]
    if packed.layout.fixed or step >= packed.shape[1]:
        return None
    part = packed.cut("K", 0, step)
    return part if strides.has_gaps(part) and not strides.why_unreadable(part) else None


def of_weight(packed: PackedWeight, turn: int) -> Iterator[Call]:
    (n, k), dtype, other = packed.shape, HALVES[turn % 2], HALVES[(turn + 1) % 2]
    yield from launch.dequantize_calls(packed, _empty(n, k, dtype=(torch.float32, dtype)[turn % 2]))
    yield from _product(packed, (torch.float32, dtype)[(turn + 1) % 2], 1, plan.any_product(packed, 1))
    if configure.has_gemm(dtype, META):
        for split in ((1,), (1, 2))[turn % 3 == 0]:
            if (config := gemm_config(packed, 16, split, META)) is not None:
                yield from _product(packed, dtype, 16, ANY_GPU.candidate(packed, 16, config))
    for kind, m in LANES.items():
        for place, x in enumerate((dtype, other)):
            if kind in plan.kinds(packed, m, x, META) and (place == 0 or kind != "gemv"):
                configs = BY_NAME[kind].configs(packed, m, META)
                yield from _product(packed, x, m, Candidate(kind, configs[(turn + place) % len(configs)]))


def _product(packed: PackedWeight, dtype: torch.dtype, m: int, candidate: Candidate) -> Iterator[Call]:
    x, out = _empty(m, packed.shape[1], dtype=dtype), _empty(m, packed.shape[0], dtype=dtype)
    return launch.linear_calls(x, packed, _empty(packed.shape[0], dtype=dtype), out, candidate=candidate)


def others() -> Iterator[tuple[str, Call]]:
    """Of the kernels that are no family of `of_weights`: 8-bit x, experts, entropy codes, caches and outliers."""
    for name, storage in (("fp8_block", "safetensors"), ("int8_channel", "safetensors"), ("q4_0", "planar"), ("fix4", "fix4"),
                          ("hlane", "hlane"), ("df11", "df11")):
        case = next(case for case in cases() if case.path.stem == name and case.storage == storage)
        packed = stream_kernels.with_typical_streams(case.module.FORMAT.empty((2048, 4096), storage, "meta", (), **case.choice))
        if packed.layout.streams:
            yield from _titled(name, of_streams(packed))
        else:
            yield from _titled(name, of_rows(packed))
    yield from _titled("experts", of_experts())
    for name in kv_caches.FORMATS:
        yield from _titled(f"cache of {name}", of_cache(name))
    entries = _empty(2049, dtype=torch.int32), _empty(99, dtype=torch.int32), _empty(99, dtype=torch.float32)
    for m, dtype in ((1, torch.bfloat16), (40, torch.float32)):
        yield "csr", csr_call(_empty(m, 2048, dtype=dtype), _empty(m, 2048, dtype=dtype), _empty(m, 512, dtype=dtype), *entries)


def of_rows(packed: PackedWeight) -> Iterator[Call]:
    """Products with x in 8 bits, and rows of experts, where there are kernels for them."""
    n, k = packed.shape
    for m, dtype in ((16, torch.bfloat16), (512, torch.float16)):
        x = _empty(m, k, dtype=dtype)
        if launch.has_quantized(x, packed):
            yield from launch.quantized_calls(x, packed, None, _empty(m, n, dtype=dtype))
        if launch.fits_experts(x, packed):
            yield from launch.grouped_calls(x, packed, _empty(9, 3, dtype=torch.int32), None, _empty(m, n // 8, dtype=dtype))


def of_streams(packed: PackedWeight) -> Iterator[Call]:
    n, k = packed.shape
    yield from launch.dequantize_calls(packed, _empty(n, k, dtype=torch.bfloat16))
    yield from stream_kernels.decode_calls(packed)[1]
    for m in (1, 16):
        if configure.has_skinny_streams(x := _empty(m, k, dtype=torch.bfloat16), packed):
            yield from stream_kernels.skinny_calls(x, packed, None, _empty(m, n, dtype=torch.bfloat16))


def of_experts() -> Iterator[Call]:
    for rows, dtype in ((16, torch.bfloat16), (128, torch.float32)):
        x, w = _empty(64, 512, dtype=dtype), _empty(8 * 256, 512, dtype=dtype)
        yield experts.matmul_call(x, w, None, _empty(64, dtype=torch.int64), _empty(9, 3, dtype=torch.int32),
                                  _empty(64, 256, dtype=dtype), rows)
        yield Call(experts.kernels.weighted_sum, (x, _empty(64, dtype=torch.int64), _empty(32, 2, dtype=dtype),
                                                  _empty(32, 512, dtype=dtype), _empty(9, dtype=torch.int64), 8, 512),
                   {"TOP": 2, "BN": experts.WIDTH}, (32, 1), {"num_warps": 4})
    yield tile_call(_empty(9, dtype=torch.int64), 64)
    sorted_pairs = [_empty(size, dtype=torch.int32) for size in (9, 64, 64, 48)]
    yield Call(experts.kernels.route, (_empty(32, 2, dtype=torch.int64), None, *sorted_pairs, 64, 16),
               {"EXPERTS": 8, "TOP": 2, "HEIGHT": experts.ROWS, "BINS": 16, "BLOCK": 1024}, (9,), {"num_warps": 4})


def of_cache(name: str) -> Iterator[Call]:
    cache, dims = kv_caches.empty(name), kv_caches.dims_of(name)
    yield from kv_launch.store_calls(cache, *next(kv_caches.tokens(dims)))
    q = kv_caches.queries(torch.bfloat16, dims)
    lengths = torch.tensor(kv_caches.LENGTHS, dtype=torch.int32)
    out = torch.empty(*q.shape[:2], cache.value_dim)
    yield from kv_launch.attention_calls(q, cache, kv_caches.TABLES, lengths, out, splits=2)


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


# -- compiling ----------------------------------------------------------------------------------------------------------


def stop_at_ir() -> None:
    """Makes this process compile to Triton's first IR alone, and raise Stopped."""
    def stop(*_: object) -> None:
        raise Stopped

    def stages_of(backend: object = None, stages: dict[str, Any] | None = None, *_: object) -> tuple[str, str] | None:
        if stages is None:
            return "only ir", "only ir"
        stages[list(stages)[1]] = stop
        return None
    triton.knobs.runtime.add_stages_inspection_hook = stages_of


def failures(arch: Arch, in_pairs: bool) -> Iterator[tuple[str, str]]:
    """Launches, and why one does not compile; '' where it does."""
    gpu = next(gpu for gpu in GPUS.values() if gpu.arch == arch.name)
    triton.runtime.driver.set_active(AbsentDriver(arch.capability or arch.name, arch.warp))
    configure.has_fp8 = lambda device: not arch.is_nvidia or arch.capability >= 89
    with configure.assumed(arch.capability // 10, gpu.multiprocessors, gpu):
        for title, call in covering([*of_weights(), *others()], in_pairs):
            reason = ""
            try:
                call.kernel.warmup(*call.arguments, grid=call.grid, **call.constants, **call.options)
            except Stopped:
                pass
            except Exception as error:
                reason = f"{type(error).__name__}: {innermost(error)}"
            yield title, reason


def innermost(error: BaseException) -> str:
    """The message of the first cause, of lines of source that Triton shows the last."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip()[-400:]


def main(arch: str = "sm_90", how: str = "few") -> int:
    if how != "whole":
        stop_at_ir()
    results = list(failures(arch_of(arch), how == "pairs"))
    failing = FAILING.get((triton.__version__, arch), set()) if how == "whole" else set()
    wrong = [f"{title}: {reason or 'compiles, but is among FAILING'}" for title, reason in results
             if bool(reason) != (title in failing)]
    print(*wrong, f"Triton {triton.__version__}, {arch}: {len(results)} kernels, {len(wrong)} wrong", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
