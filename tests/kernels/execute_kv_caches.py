"""Kernels of caches on the PTX machine, as JSON: `python -m tests.kernels.execute_kv_caches`, without TRITON_INTERPRET."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import torch

from qdsl.analyze.execute import Finding, execute
from qdsl.analyze.gpus import arch_of
from qdsl.kv_cache import cache_launches, store_reference
from qdsl.runtime.gpu import configure
from tests.kernels.kv_caches import FORMATS, LENGTHS, TABLES, dims_of, empty, expected, queries, tokens
from tests.kernels.test_kv_cache import differences
from tests.support.covering import ALL
from tests.support.only_ptx import stop_at_ptx

ARCHS = ("sm_80", "sm_90")


def result(name: str, arch: str, dtype: torch.dtype) -> dict[str, Any]:
    """Tensors in which what kernels store differs, the error of attention as a share of what is allowed, and findings."""
    reference, cache, findings = empty(name), empty(name), list[Finding]()
    for step in islice(tokens(dims_of(name)), 2):                             # the third is as the second
        store_reference(reference, *step)
        for call in cache_launches.store_calls(cache, *step):
            findings += execute(call, arch).findings
    q = queries(dtype, dims_of(name))
    wanted, allowed = expected(q, reference)
    out = torch.full_like(wanted, torch.nan, dtype=dtype)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    for call in cache_launches.attention_calls(q, cache, TABLES, lengths, out, splits=2):
        outputs = (out,) if call.family == "combine" else call.arguments[8:10]
        findings += execute(call, arch, outputs=[tensor for tensor in outputs if isinstance(tensor, torch.Tensor)]).findings
    error = float(((out.float() - wanted).abs() / allowed).nan_to_num(torch.inf).max())
    tail = [] if reference.tail is None or torch.equal(reference.tail, cache.tail) else ["tail"]
    return {"name": name, "arch": arch, "different": differences(reference, cache) + tail, "error": error,
            "findings": [str(finding) for finding in findings]}


def main() -> None:
    stop_at_ptx()
    for number, name in enumerate(FORMATS):
        for arch in ARCHS if ALL or name == "fp8_channel" else ARCHS[number % 2:][:1]:
            with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
                print(json.dumps(result(name, arch, (torch.float16, torch.bfloat16)[number // 2 % 2])))


if __name__ == "__main__":
    main()
