"""Compares codes for the exponents of bfloat16 weights, shipped and others: bits per weight, and the GPU's work to decode them.

`python -m bench.codes [FILE.safetensors ...]` prints bits of normal weights and of the matrices of files.  `--kernels` also
compiles decoders for sm_90 and counts their instructions.  It bounds their time on an H200 by issue slots and pipes, the L1 cache
and memory; nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from qdsl.checkpoint.files.folder import Folder
from qdsl.codecs import exponents
from qdsl.codecs.huffman import canonical_code
from qdsl.jobs.compress import df11
from qdsl.jobs.compress.exponent_forms import FIX3, FIX4, HLANE

Matrix = NDArray[np.uint16]                                      # patterns [N, K]
LONGEST = 8                                                      # bits of hlane's codes
LANES = 32                                                       # of a group, whose words take turns


# -- bits --------------------------------------------------------------------------------------------------------------


def rows(patterns: Matrix) -> Iterator[tuple[str, float]]:
    """What a code does, and the bits per weight that it takes, signs and mantissas counted in."""
    symbols, sign_mantissa = exponents.split_rows(patterns)
    counts = exponents.count_symbols(symbols)
    pairs = np.bincount(symbols.reshape(-1)[1:].astype(np.int64) * 256 + symbols.reshape(-1)[:-1], minlength=1 << 16)
    yield "entropy of exponents", 8 + _entropy(counts)
    yield "entropy of exponents, given the one before", 8 + _entropy(pairs) - _entropy(counts)
    yield "entropy of exponents, and of signs with mantissas", _entropy(exponents.count_symbols(sign_mantissa)) + _entropy(counts)
    for longest in (32, 12, LONGEST, 6):
        lengths = _lengths(counts, longest)
        if lengths is not None:
            yield f"Huffman, at most {longest} bits", 8 + float(counts @ lengths) / symbols.size
    for states in (256, 1024):
        if np.count_nonzero(counts) <= states:
            yield f"tANS, {states} states", 8 + _by_states(symbols, counts, states, 2048).mean() / 2048
    for name, tensors in (("df11", df11.encode([patterns.reshape(-1)])), ("hlane", HLANE.encode(patterns)),
                          ("fix4", FIX4.encode(patterns)), ("fix3", FIX3.encode(patterns))):
        yield name, 8 * sum(tensor.nbytes for tensor in tensors.values()) / patterns.size
    yield from _layouts(symbols, counts)


def _entropy(counts: NDArray[np.int64]) -> float:
    """Bits per symbol that no code of single symbols goes below."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def _lengths(counts: NDArray[np.int64], longest: int) -> NDArray[np.uint8] | None:
    """Bits of each symbol's code; None where there are too many symbols."""
    return canonical_code(counts, longest).lengths if np.count_nonzero(counts) <= 1 << longest else None


def _layouts(symbols: NDArray[np.uint8], counts: NDArray[np.int64]) -> Iterator[tuple[str, float]]:
    """Streams of so many symbols: as hlane has them, padded to the longest of a group, and one behind the other."""
    lengths = _lengths(counts, LONGEST)
    for size in (128, 512, 2048):
        if symbols.size < size * LANES:
            continue
        if lengths is not None:
            bits = lengths[_streams(symbols, size)].sum(1, dtype=np.int64)
            yield f"Huffman, streams of {size}, padded", 8 + _padded(bits) / size
            yield f"Huffman, streams of {size}, tight", 8 + _tight(bits) / size
        yield f"tANS, 1024 states, streams of {size}, tight", 8 + _tight(10 + _by_states(symbols, counts, 1024, size)) / size


def _streams(symbols: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Whole groups of streams of neighbours, [streams, size]."""
    whole = symbols.size // (size * LANES) * size * LANES
    return symbols.reshape(-1)[:whole].reshape(-1, size)


def _padded(bits: NDArray[np.int64]) -> float:
    """Bits of a stream where each takes as many words of 32 bits as the longest of its group."""
    return float(32 * -(-bits.reshape(-1, LANES).max(1) // 32).mean())


def _tight(bits: NDArray[np.int64]) -> float:
    """Bits of a stream in whole words of 16 bits, and 16 bits that say where it begins."""
    return float(16 * (-(-bits // 16).mean() + 1))


def _by_states(symbols: NDArray[np.uint8], counts: NDArray[np.int64], states: int, size: int) -> NDArray[np.int64]:
    """Bits that tANS writes for each stream of `size` symbols, without the last state."""
    share = _share(counts, states)
    rank = np.cumsum(share) - share                              # where a symbol's entries of `after` begin
    places = np.arange(states) * (states // 2 + states // 8 + 3) % states      # FSE's spread: odd steps, each state once
    spread = np.empty(states, np.int64)
    spread[places] = np.repeat(np.arange(256), share)
    after = states + np.argsort(spread, kind="stable")           # of a symbol and a number below its share: the next state
    streams = np.ascontiguousarray(_streams(symbols, size).T[::-1])
    state, bits = np.full(streams.shape[1], states), np.zeros(streams.shape[1], np.int64)
    for step in streams:
        own = share[step]
        count = np.floor(np.log2(state / own)).astype(np.int64)
        bits += count
        state = after[rank[step] + (state >> count) - own]
    return bits


def _share(counts: NDArray[np.int64], states: int) -> NDArray[np.int64]:
    """How many of the states each symbol has: by its count, and at least one."""
    exact = counts / counts.sum() * states
    share = np.where(counts > 0, np.maximum(1, np.floor(exact)), 0).astype(np.int64)
    while share.sum() != states:
        step = 1 if share.sum() < states else -1
        free = np.flatnonzero(share + step > 0) if step < 0 else np.flatnonzero(counts)
        share[free[(counts[free] * np.log2((share[free] + step) / share[free])).argmax()]] += step
    return share


def normal(n: int, k: int) -> Matrix:
    """Patterns of normal numbers."""
    values = np.random.default_rng(0).standard_normal((n, k), dtype=np.float32) * np.float32(0.02)
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


def matrices(path: Path) -> Iterator[tuple[str, Matrix]]:
    """The bfloat16 matrices of a file."""
    with Folder(path) as folder:
        for name in folder.names():
            tensor = folder.tensor(name)
            if tensor.dim() == 2 and tensor.dtype == torch.bfloat16:
                yield name, tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.codes", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    weights = {"normal [4096, 4096]": normal(4096, 4096)}
    for path in options.files:
        weights |= {f"{name.removesuffix('.weight')} {list(one.shape)}": one for name, one in matrices(path)}
    measured = {title: dict(rows(patterns)) for title, patterns in weights.items()}
    table = [["bits per weight", *measured]]
    for what in dict.fromkeys(what for column in measured.values() for what in column):
        table.append([what, *(f"{column[what]:.3f}" if what in column else "-" for column in measured.values())])
    print(aligned(table))
    if options.kernels:
        from bench.code_counts import table as counted

        print("", aligned(counted(next(iter(measured.values())))), sep="\n")
    return 0


def aligned(table: list[list[str]]) -> str:
    """Rows with their columns aligned."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)


if __name__ == "__main__":
    sys.exit(main())
