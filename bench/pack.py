"""Times packing of codes, one byte each, into the words of GPTQ and AWQ checkpoints.

MB/s are 1e6 bytes of the bfloat16 weight per second, as in other projects' figures.  Those were measured elsewhere with two
threads: 188 for gptqmodel's C++ extension, 86 for its Python path, 43 for autoawq.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.figure import Figure, rates
from bench.timing import Side, WrongResult, calls
from bench.weights import BF16_BYTES, SHAPE, format_of, packed

PARAMS: dict[str, Any] = {"bits": 4, "group": 128}
STORAGES = ("gptq_v2", "awq")


def figures(rounds: int) -> Iterator[Figure]:
    """Both storages of the same fields, on one thread."""
    sides = [Side(pack, {"storage": storage}) for storage in STORAGES]
    for storage, seconds in zip(STORAGES, calls(sides, rounds, same=False), strict=True):
        yield Figure(f"pack int4 codes, group 128, into {storage}", "MB/s", rates(BF16_BYTES / 1e6, seconds), 1000,
                     note="of bf16 weight; peers 43 to 188")


def pack(storage: str) -> Callable[[], dict[str, Tensor]]:
    """Codes, zero points, scales and group indices into a storage, all checks included."""
    form = format_of("int_group")
    fields = {name: field.contiguous() for name, field in form.unpack(packed("int_group", storage, **PARAMS)).items()}
    fields["g"] = torch.arange(SHAPE[1], dtype=torch.int32) // PARAMS["group"]
    back = form.unpack(form.pack(fields, storage=storage, **PARAMS))
    if not all(torch.equal(back[name], fields[name]) for name in back):
        raise WrongResult(f"{storage} does not give back the fields that were packed")
    return lambda: form.pack(fields, storage=storage, **PARAMS).tensors
