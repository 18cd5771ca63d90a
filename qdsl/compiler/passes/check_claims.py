"""What the author says of the format's size and of shapes in files, against the layout."""

from __future__ import annotations

from fractions import Fraction
from math import prod

from qdsl.compiler.ir.program import Program
from qdsl.compiler.passes.samples import divisor_of, samples, size_axis
from qdsl.compiler.passes.streams import STREAMS
from qdsl.compiler.spec.source import Problems
from qdsl.core.shapes import axis, seen_shape


def check_claims(program: Program, problems: Problems) -> Program:
    for claim in program.spec.claims:
        if claim.name.value == "bytes":
            records = [tensor.record_bits // 8 for tensor in program.tensors if tensor.words > 1]
            found = Fraction(records[0]) if len(records) == 1 else None
            if found is None:
                problems.add(claim.name.span, "'bytes' is for storages with one tensor of records")
                continue
        else:
            found = bits_per_weight(program)
        if found != Fraction(str(claim.value)):
            problems.add(claim.name.span, f"the spec claims {claim.value:g} {claim.name}, and '{program.storage}' has "
                                          f"{float(found):g}")
    _check_seen(program, problems)
    return program


def _check_seen(program: Program, problems: Problems) -> None:
    """A tensor has as many elements in the shape that files give it as in its own."""
    defined = [var.extent for tensor in program.tensors for var in tensor.vars]
    for tensor in program.tensors:
        if seen := tensor.seen:
            for sample in samples(program, defined):
                own = prod(var.extent(sample) for var in tensor.vars) * tensor.words
                if seen_shape([axis(each.value) for each in seen], sample["N"], sample["K"], sample, own) is None:
                    problems.add(seen[0].span, f"'{tensor.name}' has {own} elements for N = {sample['N']}, K = {sample['K']}, "
                                               "which have no such shape")
                    break


def bits_text(program: Program) -> str:
    """Bits per weight as a phrase, which says where a code adds to them as weights are."""
    coded = [tensor.name for tensor in program.tensors if tensor.stream and not STREAMS[tensor.stream.coding].bits]
    more = f", and what the code of {coded[0]} takes" if coded else ""
    return f"{float(bits_per_weight(program)):.6g} bits per weight{more}"


def bits_per_weight(program: Program) -> Fraction:
    """Stored bits per weight of a large matrix of whole blocks, with the default sizes; of a stream what all weights take."""
    extents = [var.extent for tensor in program.tensors for var in tensor.vars]
    sizes = {p.name.value: p.values[0] for p in program.spec.params if p.name.value in program.sizes}
    n, k = (divisor_of(axis, extents) * (1 << 14) for axis in ("N", "K"))
    for value in sizes.values():
        n, k = (n * max(1, int(value)), k * max(1, int(value)))
    env = {"N": n, "K": k, **{s: (n if size_axis(program, s) == "N" else k) if v == -1 else int(v) for s, v in sizes.items()}}
    bits = 0
    for tensor in program.tensors:
        records = 1
        for var in tensor.vars:
            records *= var.extent(env)
        if tensor.vars and not tensor.optional and {v.name for v in tensor.vars}:
            bits += records * (STREAMS[tensor.stream.coding].bits if tensor.stream else tensor.record_bits)
    exact = Fraction(bits, n * k)
    return exact.limit_denominator(1 << 12)
