"""What the author says of the format's size and of shapes in files, against the layout."""

from __future__ import annotations

from fractions import Fraction
from math import prod

from qdsl.compiler.ir.program import Program, Tensor
from qdsl.compiler.passes.samples import axis_divisor, samples, size_axis
from qdsl.compiler.spec.source import Problems
from qdsl.core.codecs import CODECS
from qdsl.core.shapes import axis, shape_in_files


def check_claims(program: Program, problems: Problems) -> Program:
    """The program unchanged; adds a problem for each claim that its layout contradicts.

    >>> shown(more="claims: {bytes: 20}")
    error: the spec claims 20 bytes, and 'p' has 18
    """
    for claim in program.spec.claims:
        if claim.name.value == "bytes":
            records = [tensor for tensor in program.tensors if tensor.words > 1]
            measured = _bytes_per_row(records[0]) if len(records) == 1 else None
            if measured is None:
                problems.add(claim.name.span, "'bytes' is for storages with one tensor of records")
                continue
        else:
            measured = bits_per_weight(program)
        if measured != Fraction(str(claim.value)):
            problems.add(claim.name.span, f"the spec claims {claim.value:g} {claim.name}, and '{program.storage}' has "
                                          f"{float(measured):g}")
    _check_file_shape(program, problems)
    return program


def _bytes_per_row(tensor: Tensor) -> Fraction:
    """The bytes per row, for the rows over which records are counted."""
    return Fraction(tensor.record_bits, 8 * axis_divisor("N", [var.extent for var in tensor.vars]))


def _check_file_shape(program: Program, problems: Problems) -> None:
    """Adds a problem if the shape in files has another number of elements than the tensor."""
    defined = [var.extent for tensor in program.tensors for var in tensor.vars]
    for name, tensors in program.stored.items():
        if seen := tensors[0].seen:
            for sample in samples(program, defined):
                own = sum(prod(var.extent(sample) for var in tensor.vars) * tensor.words for tensor in tensors)
                if shape_in_files([axis(extent.value) for extent in seen], sample["N"], sample["K"], sample, own) is None:
                    problems.add(seen[0].span, f"'{name}' has {own} elements for N = {sample['N']}, K = {sample['K']}, "
                                               "which have no such shape")
                    break


def bits_text(program: Program) -> str:
    """Bits per weight as a phrase; for an entropy code those of normally distributed weights."""
    return f"{typical_bits(program):.6g} bits per weight{' where weights are normal' if _coded_bits(program) else ''}"


def typical_bits(program: Program) -> float:
    """Stored bits per weight; for an entropy code those of normally distributed weights."""
    return float(bits_per_weight(program)) + _coded_bits(program)


def _coded_bits(program: Program) -> float:
    return sum(CODECS[tensor.stream.coding].normal for tensor in program.tensors if tensor.stream)


def bits_per_weight(program: Program) -> Fraction:
    """Stored bits per weight of a large matrix of whole blocks, with the default sizes; for a stream without its coded part."""
    extents = [var.extent for tensor in program.tensors for var in tensor.vars]
    sizes = {p.name.value: p.values[0] for p in program.spec.params if p.name.value in program.sizes}
    n, k = (axis_divisor(axis, extents) * (1 << 14) for axis in ("N", "K"))
    for value in sizes.values():
        n, k = (n * max(1, int(value)), k * max(1, int(value)))
    n, k = program.spec.fixed.get("N", n), program.spec.fixed.get("K", k)
    env = {"N": n, "K": k, **{s: (n if size_axis(program, s) == "N" else k) if v == -1 else int(v) for s, v in sizes.items()}}
    bits = 0
    for tensor in program.tensors:
        records = 1
        for var in tensor.vars:
            records *= var.extent(env)
        if tensor.vars and not tensor.optional and {v.name for v in tensor.vars}:
            bits += records * (CODECS[tensor.stream.coding].bits if tensor.stream else tensor.record_bits)
    return Fraction(bits, n * k).limit_denominator(1 << 12)
