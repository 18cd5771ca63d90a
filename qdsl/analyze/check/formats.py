"""The checks of a format on the CPU: bits, round trips, quantization, and values that a file lists."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qdsl.analyze.check import spec_bits
from qdsl.analyze.check.cases import Params, StorageCase, storage_cases
from qdsl.analyze.check.check_branches import check_storage_branches
from qdsl.analyze.check.compare import describe_difference, differing_mask, field_spec_line, shown
from qdsl.analyze.check.stored_bits import StoredBits
from qdsl.checkpoint.files.safetensors import CheckpointError, TensorFile
from qdsl.checkpoint.files.strict_json import shown as quoted
from qdsl.compiler.spec.model import Spec
from qdsl.core.places import check_regular
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.format import Format

MOST_BITS = 1 << 19                                              # field bits to trace one by one
NAMES = 12                                                       # names of a file's tensors to list in a message
EXPECTED = "expected"                                            # the array of a golden file with the values of the weights


class GoldenError(ValueError):
    """A golden file cannot be read, or has no expected values."""


class Skipped(Exception):
    """A check does not apply; the message says why."""


@dataclass(frozen=True)
class Check:
    """The outcome of one check of a storage.  status: 'ok', 'FAILED' or 'skipped'; text: what was checked, or is wrong."""

    storage: str
    params: Params
    name: str
    status: str
    text: str


def run_check(case: StorageCase, name: str, run: Callable[[StorageCase], tuple[str, str]]) -> Check:
    """The outcome of a function that returns (problem or '', what it checked); an exception of generated code is a problem."""
    try:
        problem, text = run(case)
        status = "FAILED" if problem else "ok"
    except Skipped as reason:
        problem, text, status = "", str(reason), "skipped"
    except Exception as error:  # generated code of any kind may raise anything
        problem, text, status = f"{type(error).__name__}: {error}", "", "FAILED"
    return Check(case.storage, case.params, name, status, problem or text)


def check_format(spec: Spec, format: Format) -> Iterator[Check]:
    """Checks every storage at every choice of parameters, without kernels."""
    for case in storage_cases(spec, format):
        if case.smallest is None:
            yield Check(case.storage, case.params, "shapes", "skipped", "no weight of up to 2560 x 2560 has these blocks")
            continue
        yield run_check(case, "bits", check_bits)
        yield run_check(case, "round trip", check_round_trip)
        if len(format.variant(case.params).storages) > 1:
            yield run_check(case, "convert", check_conversions)
        if format.variant(case.params).encode is not None:
            yield run_check(case, "quantize", check_quantize)
        if format.variant(case.params).plus:
            yield run_check(case, "branches", check_storage_branches)


def check_bits(case: StorageCase) -> tuple[str, str]:
    """Each stored bit is the field bit that the record says, in both directions, and padding is zero."""
    shape = case.two_block_shape
    fields = case.fields(shape)
    if case.has_row_codes:
        raise Skipped("codes stand for rows of tables; the round trip checks them")
    if spec_bits.digit_fields(case.spec) & fields.keys():
        raise Skipped("bytes of base-3 digits have no bits of their own; the round trip checks them")
    count = sum(field.numel() * spec_bits.field_bits(case.spec, name, case.params) for name, field in fields.items())
    if count > MOST_BITS:
        raise Skipped(f"{list(shape)} has {count} bits, too many to follow; the round trip checks them")
    stored = StoredBits(case, shape)
    if spec_bits.has_operations(case.spec, case.storage, case.params):
        return stored.bytes_problem(), f"{count} bits survive unpack and pack; 'stored' changes several at once"
    return stored.unpack_problem() or stored.pack_problem(), f"{count} bits of {list(shape)} lie where the records say"


def check_round_trip(case: StorageCase) -> tuple[str, str]:
    """Fields survive pack and unpack, and wrap takes the packed tensors."""
    shapes = case.test_shapes(4)
    for seed, shape in enumerate(shapes):
        fields = case.fields(shape, seed)
        packed = case.format.pack(fields, storage=case.storage, **case.params)
        again = case.format.wrap(packed.tensors, shape, case.storage, **dict[str, Any](case.params))
        for weight in (packed, again):
            if problem := _changed_field(case, fields, weight.format.unpack(weight)):
                return f"{list(shape)}: {problem}", ""
        if moved := case.random_perm(shape, seed):
            packed = case.format.pack({**fields, **moved}, storage=case.storage, **case.params)
            if problem := _changed_field(case, {**fields, **moved}, case.format.unpack(packed)):
                return f"{list(shape)}, columns in an order of their own: {problem}", ""
    return "", f"fields survive pack, wrap and unpack at {', '.join(f'{n}x{k}' for n, k in shapes)}"


def _changed_field(case: StorageCase, fields: dict[str, Tensor], again: dict[str, Tensor]) -> str:
    """The first field that changes by pack and unpack, how many differ, and the line that stores it."""
    if fields.keys() != again.keys():
        return f"unpack returns the fields {', '.join(again)} instead of {', '.join(fields)}"
    for name, field in fields.items():
        if again[name].shape != field.shape or again[name].dtype != field.dtype:
            return f"unpack returns '{name}' as {again[name].dtype} {list(again[name].shape)}"
        unlike = differing_mask(again[name], field)
        if unlike.any():
            place = tuple(int(i) for i in unlike.nonzero()[0])
            tensor = next(iter(case.layout.tensors))
            return (f"{int(unlike.sum())} of {unlike.numel()} of '{name}' differ; first {name}{list(place)}: "
                    f"{shown(again[name][place])} instead of {shown(field[place])}; "
                    f"{field_spec_line(case.spec, case.storage, tensor, name)}")
    return ""


def _packed(case: StorageCase) -> PackedWeight:
    return case.format.pack(case.fields(case.two_block_shape), storage=case.storage, **case.params)


def check_conversions(case: StorageCase) -> tuple[str, str]:
    """Conversion to other storages that can hold the weight, and back, keeps all numbers."""
    packed = _packed(case)
    wanted = case.format.dequantize(packed, torch.float32)
    notes: list[str] = []
    for storage in case.format.variant(case.params).storages:
        try:
            weights = [case.format.convert(packed, storage)]
            weights.append(case.format.convert(weights[0], case.storage))
        except FormatError as error:
            notes.append(f"{storage} refuses: {str(error).splitlines()[0]}")
            continue
        for weight in weights:
            if problem := describe_difference(case.format.dequantize(weight, torch.float32), wanted, packed, case.spec):
                return f"through {storage}: {problem}", ""
        notes += [storage] if storage != case.storage else []
    return "", "; ".join(notes)


def check_quantize(case: StorageCase) -> tuple[str, str]:
    """Quantizing a random weight keeps both signs and loses less than its own energy; unpack and pack keep the result.

    A quantizer that refuses such a weight fails.
    """
    shape = case.two_block_shape
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    try:
        packed = case.format.quantize(weight, case.storage, **dict[str, Any](case.params))
    except FormatError as error:
        return f"the quantizer refuses a random weight of {list(shape)}: {str(error).splitlines()[0]}", ""
    decoded = case.format.dequantize(packed, torch.float32)
    change = float((decoded - weight).norm() / weight.norm())
    again = case.format.pack(case.format.unpack(packed), storage=case.storage, **case.params)
    problem = describe_difference(case.format.dequantize(again, torch.float32), decoded, packed, case.spec)
    for sign, of_sign in (("negative", weight < 0), ("positive", weight > 0)):
        if not problem and not decoded[of_sign].any():
            problem = f"all {sign} weights of a random weight of {list(shape)} become 0"
    if not change < 1:
        problem = f"a random weight of {list(shape)} loses {change:.0%} of its norm; zeros would lose 100 %"
    return problem, f"a random weight of {list(shape)} changes by {change:.2%} of its norm"


def check_golden(spec: Spec, format: Format, path: Path) -> Check:
    """Compares a weight's decoded values with those in a file.

    path: .npz or .safetensors with the stored tensors by their names, and the weights [N, K] as 'expected'.  Text entries
    (metadata in safetensors) 'storage', or named like parameters, choose if tensors are ambiguous.  Raises GoldenError, OSError.
    """
    tensors, texts = read_golden(path)
    if EXPECTED not in tensors or tensors[EXPECTED].dim() != 2:
        raise GoldenError(f"{path}: no array '{EXPECTED}' [N, K] with the values of the weights")
    wanted = tensors.pop(EXPECTED)
    params = {name: value for name, values in format.params.items() for value in values if texts.get(name) == str(value)}
    try:
        packed = format.wrap(tensors, (wanted.shape[0], wanted.shape[1]), texts.get("storage"), verify=True, **params)
    except FormatError as error:
        return Check(texts.get("storage", ""), params, "golden", "FAILED", str(error))
    case = StorageCase(spec, format, packed.storage, packed.params)
    dtype = wanted.dtype if wanted.dtype in (torch.float16, torch.bfloat16) else torch.float32

    def run(_: StorageCase) -> tuple[str, str]:
        decoded = format.dequantize(packed, dtype).to(wanted.dtype)
        return describe_difference(decoded, wanted, packed, spec), f"{wanted.numel()} weights are those of {path.name}"

    return run_check(case, "golden", run)


def read_golden(path: Path, names: Collection[str] | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a .npz or .safetensors file, and its texts: 0-dimensional arrays, or the metadata.

    names: the tensors to read, by default all.  Raises GoldenError for a wrong file, and for a name that it does not have.
    """
    try:
        if path.suffix == ".safetensors":
            with TensorFile(path, copies=True) as file:
                _require_names(names, file.names())
                return ({name: file.tensor(name) for name in (file.names() if names is None else names)},
                        dict(file.header.metadata))
        if not zipfile.is_zipfile(check_regular(path)):
            raise ValueError("neither a .safetensors nor a .npz file")
        with np.load(path, allow_pickle=False) as arrays:
            _require_names(names, arrays.files)
            if names is not None:
                return {name: torch.from_numpy(arrays[name]) for name in names}, {}
            return ({name: torch.from_numpy(arrays[name]) for name in arrays.files if arrays[name].ndim},
                    {name: str(arrays[name]) for name in arrays.files if not arrays[name].ndim})
    except CheckpointError as error:                             # which names the path
        raise GoldenError(str(error)) from error
    except (ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise GoldenError(f"{path}: {error}") from error


def _require_names(names: Collection[str] | None, stored: Collection[str]) -> None:
    """Raises ValueError for a name that a file does not have, with those that it has."""
    absent = [name for name in names or () if name not in stored]
    if absent:
        more = f", and {len(stored) - NAMES} more" if len(stored) > NAMES else ""
        raise ValueError(f"no tensor {quoted(absent[0])}; it has {', '.join(map(quoted, [*stored][:NAMES])) or 'none'}{more}")
