"""Small kernels examined, as JSON: `python -m tests.kernels.analyze_kernels`.  Triton must not be interpreting."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import compute_cache_key, create_function_from_signature
from typer.testing import CliRunner

import qdsl
from qdsl.analyze import AnalyzeError, launches, report
from qdsl.analyze.compile import specialize_arguments
from qdsl.cli import app
from qdsl.runtime.libraries.call import Call
from tests.support import small_kernels


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def sums(columns: int, dtype: torch.dtype = torch.float16, *, block: int = 512, offset: int = 0, **options: Any) -> Call:
    """Row sums of a weight of 256 rows, 8 rows a program."""
    w = meta(256 * columns + offset, dtype=dtype)[offset:]
    return Call(small_kernels.sums, (w, meta(256, dtype=torch.float32), columns), {"BN": 8, "BK": block}, (32,),
                {"num_warps": 4, **options}, weights=8 * columns, step=8 * block)


CALLS = {
    "f16": sums(8192), "i8": sums(8192, torch.int8), "odd": sums(8193), "offset": sums(8192, offset=1),
    "spilling": sums(8192, block=2048, maxnreg=24),
    "copy": Call(small_kernels.copy, (meta(1 << 20), meta(1 << 20)), {"BK": 4096}, (256,), {"num_warps": 4}, weights=4096),
    "product": Call(small_kernels.product, (meta(4096, 4096), meta(16, 4096), meta(4096, 16, dtype=torch.float32), 4096),
                    {"BN": 64, "BK": 64}, (64,), {"num_warps": 4}, weights=64 * 4096, step=64 * 64),
}
REFUSED = {
    "static_assert": Call(small_kernels.refused, (meta(1), meta(1)), {"BK": 16}, (1,), {}, weights=16),
    "weights": Call(small_kernels.copy, (meta(1), meta(1)), {"BK": 16}, (1,), {}),
    "argument": Call(small_kernels.copy, (meta(1),), {"BK": 16}, (1,), {}, weights=16),
    "dtype": Call(small_kernels.copy, (meta(1, dtype=torch.complex64), meta(1)), {"BK": 16}, (1,), {}, weights=16),
}


def refusal(call: Call) -> str:
    try:
        report(call, "sm_90")
    except AnalyzeError as error:
        return str(error)
    return "none"


BACKEND = make_backend(GPUTarget("cuda", 90, 32))


def bound_by_triton(call: Call) -> Any:
    """Arguments by name, how Triton's own launcher specialises them, and options."""
    return create_function_from_signature(call.kernel.signature, call.kernel.params, BACKEND)(*call.arguments, **call.constants)


def as_triton_does(call: Call) -> bool:
    """Whether arguments are specialised as Triton's own launcher does it."""
    bound, specialization, options = bound_by_triton(call)
    _, types, constants, hints = call.kernel._pack_args(BACKEND, options, bound, specialization, options)
    return specialize_arguments(call) == (types, constants, {place: hint for place, hint in hints.items() if hint})


def cache_key(call: Call) -> str:
    """What Triton keeps a compiled kernel under."""
    _, specialization, options = bound_by_triton(call)
    return str(compute_cache_key({}, specialization, options))


def small(columns: int, offset: int = 0) -> Call:
    """A launch over real memory: integers of 1, odd ones, long ones and odd addresses change the kernel."""
    w = torch.empty(64, dtype=torch.uint8)
    return Call(small_kernels.sums, (w[offset:], torch.empty(1, dtype=torch.bfloat16), columns), {"BN": 8, "BK": 16}, (1,), {})


def command(*arguments: str) -> str:
    """What the command prints."""
    done = CliRunner().invoke(app, ["analyze", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


if __name__ == "__main__":
    q4_0 = launches.meta_weight(qdsl.load("q4_0"), (4096, 4096), None, {})
    planar = [launches.meta_weight(qdsl.load(name), (4096, 4096), "planar", {}) for name in ("q4_0", "nvfp4")]
    families = [*launches.product_calls(planar[0], "linear", 1, torch.bfloat16),
                *launches.product_calls(planar[1], "linear", 8, torch.float16)]
    others = [replace(call, constants={**call.constants, "numbers": families[i - 1].constants["numbers"]})
              for i, call in enumerate(families)]
    launched = [*CALLS.values(), *launches.product_calls(q4_0, "linear", 1, torch.bfloat16), *families,
                *map(small, (1, 2, 48, 1 << 31)), small(16, offset=1), small(16, offset=16)]
    print(json.dumps({
        "reports": {arch: {name: asdict(report(call, arch)) for name, call in CALLS.items()} for arch in ("sm_80", "sm_100")},
        "sm_120": asdict(report(CALLS["product"], "sm_120")),
        "refused": {name: refusal(call) for name, call in REFUSED.items()},
        "specialised": [as_triton_does(call) for call in launched],
        "keys": [[cache_key(call) for call in calls] for calls in (families, map(replace, families), others)],
        "text": command("q4_0", "--arch", "sm_90", "--dump"),
        "json": command("int_group", "--param", "bits=8", "--param", "group=32", "--storage", "gptq_v1", "--rows", "3", "--shape",
                        "256", "512", "--x", "f16", "--kernel", "linear", "--kernel", "dequantize", "--gpu", "H200", "--json"),
    }))
