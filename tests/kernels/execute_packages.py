"""Kernels of other packages on the PTX machine, as JSON: `python -m tests.kernels.execute_packages inductor`, or `gemlite`.

Neither needs a GPU: kernels come as Triton source, which is compiled for sm_90.  Triton must not be interpreting.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from qdsl.analyze.execute import Options, execute
from qdsl.runtime.libraries.call import Call

ARCH, XBLOCK = "sm_90", 16


@contextmanager
def hopper() -> Iterator[None]:
    """What packages ask of Triton and torch about a GPU, answered for one that is not there."""
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    properties = SimpleNamespace(name="H100", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448)
    with mock.patch.object(triton.runtime.driver, "_active", target), \
            mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties), \
            mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)):
        yield


# -- torch inductor ------------------------------------------------------------------------------------------------------------


class Launched:
    """A kernel of inductor, which runs on the machine where its wrapper launches it."""

    findings: ClassVar[list[str]] = []
    kernels: ClassVar[list[str]] = []

    def __init__(self, name: str, source: str) -> None:
        source = re.sub(r"@triton_heuristics\..*?(?=@triton\.jit)", "", source, flags=re.S).replace(
            "triton_helpers.set_driver_to_cpu()", "")
        path = Path(tempfile.mkdtemp()) / f"{name}.py"           # triton.jit reads the source from the file
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.kernel = getattr(module, name)

    def run(self, *arguments: Any, stream: object) -> None:
        """Programs take XBLOCK of the numbers that come first among the sizes."""
        sizes = [argument for argument in arguments if isinstance(argument, int)]
        call = Call(self.kernel, arguments, {"XBLOCK": XBLOCK}, (-(-sizes[0] // XBLOCK),), {"num_warps": 4})
        named = zip(self.kernel.arg_names, arguments, strict=False)
        outputs = [argument for name, argument in named if name.startswith("out_ptr")]
        execution = execute(call, ARCH, outputs=outputs, options=Options(order="reverse"))
        self.findings.extend(map(str, execution.findings))
        self.kernels.append(execution.name)


def normalized(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.softmax(x * w, -1) + torch.tanh(x)).sum(0)


def inductor() -> Iterator[dict[str, Any]]:
    """A function that torch.compile turns into Triton, wrapper and all."""
    import torch._inductor.config as config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(7, 300, generator=generator), torch.randn(300, generator=generator)
    with hopper(), config.patch(cpu_backend="triton", force_disable_caches=True, compile_threads=1), mock.patch.object(
            AsyncCompile, "triton", lambda self, name, source, **_: Launched(name, source)):
        compiled: Any = compile_fx(make_fx(normalized)(x, w), [x, w])
        result = compiled(x, w)
    result = result[0] if isinstance(result, tuple | list) else result
    exact = normalized(x.double(), w.double())
    yield {"what": "inductor", "kernels": Launched.kernels, "findings": Launched.findings,
           "error": (result - exact).abs().max().item()}


# -- GemLite -------------------------------------------------------------------------------------------------------------------


def gemlite() -> Iterator[dict[str, Any]]:
    """A row of x by a weight of 4 bits in groups with zero points: sums in parts, added by relaxed atomics.

    Numbers are such that every sum is exact.  Programs run in three orders.
    """
    with hopper(), redirect_stdout(sys.stderr):                  # it prints what it loads
        kernels: Any = importlib.import_module("gemlite.triton_kernels.gemv_kernels")
    n, k, group, per_word = 192, 512, 64, 8
    generator = torch.Generator().manual_seed(0)
    codes, zeros = (torch.randint(0, 16, shape, generator=generator) for shape in ((k, n), (k // group, n)))
    scales = 2.0 ** torch.randint(-2, 2, (k // group, n), generator=generator)
    x = torch.randint(-3, 4, (1, k), generator=generator).half()
    words = (codes.view(k // per_word, per_word, n) << 4 * torch.arange(per_word)[:, None]).sum(1)
    words = torch.where(words >> 31 > 0, words - (1 << 32), words).to(torch.int32)
    exact = x.double() @ ((codes - zeros.repeat_interleave(group, 0)) * scales.repeat_interleave(group, 0)).double()
    block = {"BLOCK_SIZE_M": 1, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "A_load_order": 0, "NUM_STAGES": 1, "dot_prod_mode": 0}
    constants = {
        "W_nbits": 4, "group_size": group, "unpack_mask": 15, "elements_per_sample": per_word, "type_id": 0, "use_prehook": False,
        "stride_am": k, "stride_ak": 1, "stride_bk": n, "stride_bn": 1, "stride_cm": n, "stride_cn": 1, "stride_meta_a_m": None,
        "stride_meta_a_g": None, "stride_meta_g": n, "stride_meta_n": 1, "input_dtype": tl.float16, "output_dtype": tl.float32,
        "acc_dtype": tl.float32, "meta_dtype": tl.float16, "channel_scale_mode": 0, "W_group_mode": 3, "zero_is_scalar": False,
        "data_contiguous": True, "EVEN_K": True, "EVEN_N": True, "N": n, "K": k, **block}
    for order in ("lockstep", "reverse", 7):
        out = torch.zeros(1, n)
        call = Call(kernels.gemv_INT_kernel.fn, (x, words, out, scales.half(), zeros.half(), None, None, 1), constants,
                    (n // 64, k // 32), {"num_warps": 1, "num_stages": 1})
        execution = execute(call, ARCH, options=Options(order=order))
        yield {"what": f"gemlite {order}", "kernels": [execution.name], "findings": list(map(str, execution.findings)),
               "error": (out.double() - exact).abs().max().item()}


if __name__ == "__main__":
    for line in {"inductor": inductor, "gemlite": gemlite}[sys.argv[1]]():
        print(json.dumps(line), flush=True)
