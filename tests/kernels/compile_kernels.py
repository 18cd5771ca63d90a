"""Compile every kernel for a GPU that is not there, and say what came out: `python -m tests.kernels.compile_kernels sm_90`.

A line of JSON per kernel.  Compiling needs neither a GPU nor a driver, but Triton must not be interpreting.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qdsl.analyze.compile import specialize_arguments
from qdsl.runtime.gpu import launch, plan
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.weight.layout import Storage
from tests.support.covering import ALL, covering, kernels
from tests.support.formats import Case, cases, smallest

TARGETS = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32),
           "gfx942": GPUTarget("hip", "gfx942", 64)}
KINDS = ("dequantize", "matvec")
SHAPE = (4096, 4096)
FUSED = r"\bfma\.rn\.f32|\bv_(?:pk_)?fma(?:c|mk|ak)?_f32|\bv_mac_f32"


def launched(case: Case, kind: str, optional: bool, dtype: torch.dtype) -> Call:
    """The launch of a kernel on a layer of at least SHAPE, but for extents that are fixed; with optional tensors or without."""
    names = [name for name, tensor in layout_of(case).tensors.items() if tensor.optional and optional]
    fixed = layout_of(case).fixed
    n, k = (fixed.get(dim) or math.lcm(least, 128) * -(-size // math.lcm(least, 128))
            for dim, least, size in zip("NK", smallest(case), SHAPE, strict=True))
    packed = case.module.FORMAT.empty((n, k), case.storage, "meta", names, **case.choice).decode_streams().as_stored()
    x, bias, product, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((1, k), n, (1, n), (n, k)))
    [call] = (launch.dequantize_calls(packed, weight) if kind == "dequantize" else
              launch.linear_calls(x, packed, bias, product, candidate=plan.any_product(packed, 1)))
    return call


def layout_of(case: Case) -> Storage:
    return case.module.FORMAT.variant(case.choice).storages[case.storage].decoded


def compiled(case: Case, kind: str, target: str, optional: bool, large: bool, dtype: torch.dtype) -> dict[str, Any]:
    call = launched(case, kind, optional, dtype)
    types, constants, hints = specialize_arguments(replace(call, constants={**call.constants, "LARGE": large}))
    source = ASTSource(call.kernel, types, constants, hints)
    binary = triton.compile(source, target=TARGETS[target], options=dict(call.options))
    text = binary.asm["ttgir"]
    loop = text[text.index("scf.for"):text.rindex("scf.yield")] if "scf.for" in text else ""
    assembly = binary.asm["ptx"] if "ptx" in binary.asm else binary.asm["amdgcn"]
    return {"kernel": f"{case} {kind}", "target": target, "optional": optional, "dtype": str(dtype)[6:], "large": large,
            "moves_in_loop": loop.count("convert_layout"), "shared_in_loop": loop.count("local_alloc"),
            "fused": len(re.findall(FUSED, assembly)),
            "loads": dict(Counter(re.findall(r"(?:ld\.global[\w.:]*|global_load_\w+|buffer_load_\w+)", assembly)))}


def compiled_for(target: str) -> list[tuple[Case, str]]:
    """Kernels that have all lines of all kernels, each for one of the GPUs; every kernel for all of them in `make test-all`."""
    every = [(case, kind) for case in cases() for kind in KINDS]
    return every if ALL else covering(every, lambda pair: kernels(*pair))[list(TARGETS).index(target)::len(TARGETS)]


def every(target: str) -> Iterator[dict[str, Any]]:
    """Every fourth kernel with 64-bit positions, and those with all of their optional tensors."""
    for number, (case, kind) in enumerate(compiled_for(target)):
        layout = layout_of(case)
        for optional in (False, True) if any(layout.tensors[name].optional for name in layout.coded) else (False,):
            yield compiled(case, kind, target, optional, optional or number % 4 == 0, torch.bfloat16)


if __name__ == "__main__":
    for line in every(sys.argv[1]):
        print(json.dumps(line), flush=True)
