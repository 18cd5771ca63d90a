"""Times changes of storage on one thread; MB/s are 1e6 bytes of the bfloat16 weight per second.  Goals: bench/families.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.figure import Figure, rates
from bench.timing import Side, WrongResult, calls
from bench.weights import BF16_BYTES, SHAPE, format_of, packed

PARAMS: dict[str, Any] = {"bits": 4, "group": 128}
ADOPTED = ("gptq_v2", "awq")                                    # what goes into another format's storage
SYMMETRIC = ("marlin", "modelopt")                               # storages of one zero point, which random ones are not


def figures(rounds: int) -> Iterator[Figure]:
    """int4, group 128, between all storages; to torch's int4pack; and columns that are gathered by their groups (act-order)."""
    form = format_of("int_group")
    names = [name for name in form.variant(form.complete(PARAMS)).storages if name not in ("gptq_v1", *SYMMETRIC)]
    pairs = [(source, result) for source in names for result in names if source != result]
    for source, result in pairs:
        [seconds] = calls([Side(convert, {"source": source, "result": result})], rounds)
        yield Figure(f"convert int4 {source} to {result}", "MB/s", rates(BF16_BYTES / 1e6, seconds),
                     note="of bf16 weight")
    for source in ADOPTED:
        [seconds] = calls([Side(adopt, {"source": source})], rounds)
        yield Figure(f"convert int4 {source} to int4pack for CPUs", "MB/s", rates(BF16_BYTES / 1e6, seconds),
                     note="of bf16 weight")
    for result in ("planar", "xpu_int4pack"):
        [seconds] = calls([Side(convert, {"source": "gptq_v2", "result": result, "act_order": True})], rounds)
        yield Figure(f"convert int4 gptq_v2 with act-order to {result}", "MB/s", rates(BF16_BYTES / 1e6, seconds),
                     note="of bf16 weight")


def convert(source: str, result: str, act_order: bool = False, threads: int = 1) -> Callable[[], dict[str, Tensor]]:
    """A change of storage, all checks included; the way back has to give the same tensors."""
    torch.set_num_threads(threads)
    form, weight = format_of("int_group"), packed("int_group", source, **PARAMS)
    if act_order:
        columns = torch.randperm(SHAPE[1], generator=torch.Generator().manual_seed(0))
        index = (torch.arange(SHAPE[1], dtype=torch.int32) // PARAMS["group"])[columns]
        weight = form.wrap({**weight.tensors, "g_idx": index}, storage=source, **PARAMS)
    back = form.convert(form.convert(weight, result), source)
    if not all(torch.equal(back.tensors[name], tensor) for name, tensor in weight.tensors.items()):
        raise WrongResult(f"{source} to {result} and back is another weight")
    return lambda: form.convert(weight, result).tensors


def adopt(source: str, threads: int = 1) -> Callable[[], dict[str, Tensor]]:
    """A change to torch's int4pack, all checks included; every number has to stay."""
    torch.set_num_threads(threads)
    form, other, weight = format_of("int_group"), format_of("int4pack"), packed("int_group", source, **PARAMS)
    int4pack = other.convert(weight, "cpu_avx512")
    if not torch.equal(other.dequantize(int4pack, torch.float32), form.dequantize(weight, torch.float32)):
        raise WrongResult(f"{source} is another weight as int4pack")
    return lambda: other.convert(weight, "cpu_avx512").tensors
