"""Times slicing a weight for tensor parallelism against reading the slice's bytes from a cached file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator

import torch

from bench.figure import Figure
from bench.timing import Side, calls
from bench.weights import floats, format_of
from qdsl.runtime import PackedWeight

RANKS = 2
COPIES = 2                                                       # rows of the weight, in times 4096
CUTS = (("q4_k", "K", 2.0), ("fp8_block", "K", 2.0), ("q4_k", "N", 2.0), ("hlane", "N", None), ("fix4", "N", None))


def figures(rounds: int) -> Iterator[Figure]:
    """The parts of row-parallel (K) and column-parallel (N) layers, at two ranks."""
    for name, dim, goal in CUTS:
        arguments = {"name": name, "dim": dim}
        cut, read = calls([Side(shard, arguments), Side(reading, arguments)], rounds, same=False)
        yield Figure(f"rank's part of {name} [{COPIES * 4096}, 4096] along {dim}, to reading its bytes", "x",
                     [a / b for a, b in zip(cut, read, strict=True)], goal, more=False)


def shard(name: str, dim: str) -> Callable[[], dict[str, torch.Tensor]]:
    """The second rank's part, its tensors contiguous as a kernel wants them."""
    packed = weight(name)
    half = packed.shape["NK".index(dim)] // RANKS
    return lambda: {key: tensor.contiguous() for key, tensor in packed.shard(dim, half, 2 * half).tensors.items()}


def reading(name: str, dim: str) -> Callable[[], dict[str, torch.Tensor]]:
    """Reading as many bytes as that part has into memory of its own."""
    nbytes = sum(tensor.nbytes for tensor in shard(name, dim)().values())
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(bytes(nbytes))

    def read() -> dict[str, torch.Tensor]:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        file.seek(0)
        file.readinto(memory.numpy().data)
        return {"bytes": memory}

    return read


def weight(name: str) -> PackedWeight:
    """A quantized weight whose rows repeat."""
    return format_of(name).quantize(floats(torch.bfloat16).repeat(COPIES, 1))
