"""Compile every kernel for a GPU that is not there, and say what came out: `python -m tests.compile_kernels sm_90`.

A line of JSON per kernel.  Compiling needs neither a GPU nor a driver, but Triton must not be interpreting.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qdsl.core.shapes import axis
from qdsl.runtime.gpu import configure, launch
from qdsl.runtime.weight.match import stored_dtype
from tests.support.covering import ALL, covering, kernels
from tests.support.formats import Case, cases

TARGETS = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32),
           "gfx942": GPUTarget("hip", "gfx942", 64)}
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int16: "*i16",
            torch.int8: "*i8", torch.uint8: "*u8", torch.uint16: "*u16", torch.uint32: "*u32"}
KINDS = ("dequantize", "linear")
SHAPE = (4096, 4096)
FUSED = r"\bfma\.rn\.f32|\bv_(?:pk_)?fma(?:c|mk|ak)?_f32|\bv_mac_f32"


def signature(case: Case, kind: str, optional: bool, dtype: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Types of a kernel's arguments, and its constants, for a large layer; optional tensors and 64-bit positions or not."""
    format = case.module.FORMAT
    storage = format.variant(case.choice).storages[case.storage].opened
    sizes = format.sizes(case.choice, SHAPE)
    rows, units = (axis(text).extent(*SHAPE, sizes) for text in (storage.kernels.rows, storage.kernels.units))
    bn, bk = configure.tile(storage.kernels.last, rows, units, storage.kernels.sums)
    types: dict[str, str] = {}
    constants: dict[str, Any] = {"BN": bn, "BK": bk}
    names = getattr(storage.kernels, kind).arg_names
    constants |= {"LARGE": optional} if "LARGE" in names else {}
    tables = dict(zip(names[len(storage.coded):], storage.kernels.tables, strict=False))
    for name in names:
        if name in storage.tensors:
            stored = storage.tensors[name]
            held = stored_dtype(str(case.choice.get(stored.dtype, stored.dtype)))
            types[name] = POINTERS[torch.uint8 if held.is_floating_point and held.itemsize == 1 else held]
            if stored.optional and not optional:
                constants[name] = None
        elif name in tables:
            types[name] = POINTERS[tables[name].values.dtype]
        elif name in ("x", "bias", "out"):
            types[name] = dtype
        else:
            types[name] = "i32"
    return {name: "constexpr" if name in constants else kind for name, kind in types.items()}, constants


def compiled(case: Case, kind: str, target: str, optional: bool, dtype: str) -> dict[str, Any]:
    kernel = getattr(case.module.FORMAT.variant(case.choice).storages[case.storage].kernels, kind)
    types, constants = signature(case, kind, optional, dtype)
    aligned = {(place,): [["tt.divisibility", 16]] for place, held in enumerate(types.values()) if held != "constexpr"}
    options = {"num_warps": launch.WARPS, **({"enable_fp_fusion": False} if kind == "dequantize" else {})}
    made = triton.compile(ASTSource(kernel, types, constants, aligned), target=TARGETS[target], options=options)
    text = made.asm["ttgir"]
    loop = text[text.index("scf.for"):text.rindex("scf.yield")] if "scf.for" in text else ""
    assembly = made.asm["ptx"] if "ptx" in made.asm else made.asm["amdgcn"]
    return {"kernel": f"{case} {kind}", "target": target, "optional": optional, "dtype": dtype,
            "large": constants.get("LARGE", False), "moves_in_loop": loop.count("convert_layout"),
            "shared_in_loop": loop.count("local_alloc"),
            "fused": len(re.findall(FUSED, assembly)),
            "loads": dict(Counter(re.findall(r"(?:ld\.global[\w.:]*|global_load_\w+|buffer_load_\w+)", assembly)))}


def compiled_for(target: str) -> list[tuple[Case, str]]:
    """Kernels that have all lines of all kernels, each for one of the GPUs; every kernel for all of them in `make test-all`."""
    every = [(case, kind) for case in cases() for kind in KINDS]
    return every if ALL else covering(every, lambda pair: kernels(*pair))[list(TARGETS).index(target)::len(TARGETS)]


def every(target: str) -> Iterator[dict[str, Any]]:
    for case, kind in compiled_for(target):
        layout = case.module.FORMAT.variant(case.choice).storages[case.storage].opened
        two = any(layout.tensors[name].optional for name in layout.coded) or "LARGE" in kernels(case, kind)[0].arg_names
        for optional in (False, True) if two else (False,):
            yield compiled(case, kind, target, optional, "*bf16")


if __name__ == "__main__":
    for found in every(sys.argv[1]):
        print(json.dumps(found), flush=True)
