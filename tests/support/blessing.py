"""Writes files of known answers.  A result is kept only if an independent reading of the spec gives the same."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qdsl.analyze.check import spec_bits as oracle
from qdsl.core.shapes import Axis
from qdsl.runtime import PackedWeight
from qdsl.runtime.format import Format
from tests.support import answers as known_answers
from tests.support.answers import (
    ABOUT,
    EDGES,
    IMPORTANCE,
    INTEGERS,
    ROWS,
    TINY,
    Answers,
    all_as_text,
    as_text,
    canonical,
    changed_weight,
    inputs,
    options,
    packed_again,
    told_lacking,
    told_params,
    weights,
    wrapped,
)
from tests.support.branch_answers import branch_case, has_own_branches
from tests.support.formats import Case, cases, module, random_packed, raw
from tests.support.slow_reading import Codes, Reading, nearest

STEPS = (0.0625, 0.05625)                                        # scales of weights: a power of two, for ties, and another
LONGEST = 20_000                                                 # characters of a file, for which longer arrays are cut short
_LONG = re.compile(r'(?<=")(\w+\[[\d,]*\]) ([0-9a-f]+)(?=")')
_LIST = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]")


class Disagreement(AssertionError):
    """The code and the second reading of a spec do not agree: nothing is blessed."""


def plan(path: Path) -> list[tuple[Case, dict[str, int | str], bool]]:
    """Every storage, variant and scale type with block lengths as short as they come, and once more without its optional tensors.

    Codes that stand for rows have none: bytes of any kind are rows of no format (test_row_codes.py).

    Of several variants, a storage is without them in the first.  Storages whose records hold several scales come last with one
    more type of them: of the others the first alone has all types.

    (case, parameters, whether optional tensors are there)
    """
    answered: list[tuple[Case, dict[str, int | str], bool]] = []
    ours = [case for case in cases(types=True) if case.path == path and not case.has_row_codes]
    more = [replace(case, params=tuple({**case.choice, name: case.module.FORMAT.params[name][1]}.items()))
            for case in ours for name in _several(case)]
    for case in [*ours, *(case for case in more if case not in ours)]:
        format = case.module.FORMAT
        layout = format.variant(case.choice).storages[case.storage]
        # Different lengths for different parameters, so that they cannot be taken for one another.
        positive = {name: sorted(v for v in format.params[name] if v > 1) for name in format.size_axes}
        short = {name: values[min(i, len(values) - 1)] for i, (name, values) in enumerate(positive.items())}
        again = bool(format.by) and any(case.storage == other.storage for other, _, _ in answered)
        optional = any(layout.tensors[name].optional for name in layout.coded) and not again
        answered += [(case, {**case.choice, **short}, present) for present in ((True, False) if optional else (True,))]
    return answered


def _several(case: Case) -> list[str]:
    """The types, first values as they are, of which a record of a tensor holds several elements."""
    tensors = case.module.FORMAT.variant(case.choice).storages[case.storage].decoded.tensors.values()
    names = {stored.dtype for stored in tensors if stored.dtype in case.choice and any(axis.words > 1 for axis in stored.axes)}
    format = case.module.FORMAT
    return sorted(name for name in names if name not in format.by and case.choice[name] == format.params[name][0])


def smallest(case: Case, params: Mapping[str, int | str]) -> tuple[int, int]:
    """The least shape of 4 rows and 32 columns or more in which every block and every record has a second one beside it.

    Blocks and records that may be short at the end are, if some shape allows it.
    """
    format = case.module.FORMAT
    short = {**params, **{name: min(v for v in format.params[name] if v > 0) for name in format.size_axes if params[name] == -1}}
    axes = _axes(case, params)

    def fits(n: int, k: int, ragged: bool) -> bool:
        sizes = format.sizes(short, (n, k))
        steps = [(axis.whole(n, k, sizes), axis.by(sizes), axis) for axis in axes]
        return all(axis.extent(n, k, sizes) is not None and whole > by and not (
            ragged and by > 1 and not axis.exact and whole % by == 0) for whole, by, axis in steps)

    fixed = case.spec.fixed
    grid = [(fixed.get("N", n), fixed.get("K", k)) for k in (*range(32, 1025), 1088, 2048) for n in range(4, 257)]
    return next(shape for ragged in (True, False) for shape in grid if fits(*shape, ragged))


def neighbours(case: Case, params: Mapping[str, int | str], shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Shapes that differ in one axis by one, or by a block or record of it."""
    sizes = case.module.FORMAT.sizes(params, shape)
    steps = sorted({1, *(by for axis in _axes(case, params) if (by := axis.by(sizes)) < 256)})
    n, k = shape
    return [(n + step, k) for step in steps] + [(n, k + step) for step in steps]


def _axes(case: Case, params: Mapping[str, int | str]) -> list[Axis]:
    """The axes of the fields and of the stored tensors, or those of their sections."""
    variant = case.module.FORMAT.variant(params)
    tensors = variant.storages[case.storage].decoded.tensors.values()
    return list({term.text: term for stored in (*variant.fields.values(), *tensors)
                 for axis in stored.axes for term in axis.terms if term.dim != "1"}.values())


# -- making -----------------------------------------------------------------------------------------------------------


def make(path: Path) -> Answers:
    """The answers of a spec.  Raises Disagreement where the code and the second reading of the spec differ."""
    format = module(path).FORMAT
    wanted = plan(path)
    seeds = iter(range(0, 1 << 20, 16))
    own = cases(types=True)
    stored = [_stored(case, params, optional, next(seeds)) for case, params, optional in wanted if case in own]
    quantized: list[Answers] = []
    seen: list[Any] = [""]                                       # parameters, and storages that choose options
    for case, params, _ in wanted:
        chosen = params, case.storage if format.variant(params).storages[case.storage].options else ""
        if format.variant(params).encode is not None and not all(choice in seen for choice in chosen):
            seen += chosen
            whole = known_answers.whole(format, params)
            fits = not known_answers.refuses(format, case.storage, whole, smallest(case, whole))
            quantized += [_quantized(case, params, STEPS[0], next(seeds)),
                          _quantized(case, whole if fits else params, STEPS[1], next(seeds))]
    stored += [_stored(case, params, optional, next(seeds)) for case, params, optional in wanted if case not in own]
    lacking = {"lacking": told_lacking(format)} if told_lacking(format) else {}
    added = [branch_case(case, case.choice, next(seeds)) for case in own if case.path == path and has_own_branches(case)]
    return {"format": format.name, **ABOUT, "params": told_params(format), "storages": list(format.storages), **lacking,
            "cases": stored, "quantized": quantized, **({"branches": added} if added else {})}


def text(answers: Answers) -> str:
    """A file of answers: with as many arrays in full as its length allows."""
    whole = _LIST.sub(lambda match: "[" + " ".join(match[1].split()) + "]", json.dumps(answers, indent=1)) + "\n"
    short = whole
    for most in (2048, 512, 128, 32):
        if len(short) > LONGEST:
            short = _LONG.sub(partial(_short, most), whole)
    return short


def _short(most: int, match: re.Match[str]) -> str:
    """An array as text with all its bytes if they are few, else without most of them."""
    data = torch.frombuffer(bytearray.fromhex(match[2]), dtype=torch.uint8)
    return match[1] + as_text(data, most).partition("]")[2]


def reading(case: Case, params: Mapping[str, int | str], shape: tuple[int, int]) -> Reading:
    return Reading(case.spec, case.storage, shape, params, case.module.FORMAT.sizes(params, shape))


def _stored(case: Case, params: dict[str, int | str], optional: bool, seed: int) -> Answers:
    """A weight of the generator's bytes."""
    format = case.module.FORMAT
    shape = smallest(case, params)
    layout = format.variant(params).storages[case.storage].decoded
    like = random_packed(case, shape, params=params).decode_streams().tensors
    absent = [name for name, stored in layout.tensors.items() if stored.optional and not optional]
    answer: Answers = {"storage": case.storage, "params": params, "shape": list(shape), "seed": seed}
    answer |= {"absent": absent} if absent else {}
    answer |= {"says": layout.shape} if layout.shape else {}
    answer["tensors"] = all_as_text({name: tensor for name, tensor in like.items() if name not in absent})
    groups = next((field.groups for field in format.variant(params).fields.values() if field.groups is not None), None)
    index = next((name for name in answer["tensors"] if layout.tensors[name].dtype == "index"), None)
    if index is not None and groups is not None:
        answer |= {"index": index, "groups": groups.extent(*shape, format.sizes(params, shape))}
    answer["tensors"] = all_as_text(inputs(answer))
    read, packed = reading(case, params, shape), wrapped(format, answer)
    fields, again = prove_stored(read, packed)
    answer["fields"] = all_as_text(fields)
    answer |= {"packed": all_as_text(again)} if all_as_text(again) != answer["tensors"] else {}
    answer["weight"] = as_text(prove_decoded(read, packed, fields))
    answer["refused"] = _refused(case, params, shape)
    if any(-1 in format.params[name] for name in format.size_axes) and not layout.least:
        answer["refused whole"] = _refused(case, known_answers.whole(format, params), shape)
    return answer


def _refused(case: Case, params: Mapping[str, int | str], shape: tuple[int, int]) -> list[list[int]]:
    """The shapes beside this one that are refused."""
    return [list(other) for other in neighbours(case, params, shape)
            if prove_refused(reading(case, params, other), case.module.FORMAT)]


def _quantized(case: Case, params: dict[str, int | str], step: float, seed: int) -> Answers:
    """What quantize makes of a float weight, by default and by every value of every option."""
    format = case.module.FORMAT
    shape = smallest(case, params)
    read = reading(case, params, shape)
    low, high = read.span()
    weight = weights(shape, seed, low, high, step)
    results: dict[str, dict[str, str]] = {}
    variant = format.variant(params)
    fixed = variant.storages[case.storage].options               # others than these may not fit the storage
    keys = ["", *(f"{name}={word}" for name, words in variant.options.items() if name not in fixed for word in words)]
    keys += [IMPORTANCE] if format.variant(params).importance else []
    keys += [ROWS, EDGES] if "power" in read.arguments or "empty" in read.arguments else []
    keys += [TINY] if read.arguments.get("by") == "exact" else []
    few = {"integers": (1 << int(read.kind(str(read.arguments["code"]))[1:])) + 3} if "steps" in read.arguments else {}
    for key in [*keys, *([INTEGERS] if few else [])]:
        arguments, other = options(key, shape[1]), changed_weight(weight, key, few.get("integers", 0))
        packed = format.quantize(other, storage=case.storage, **params, **arguments)
        prove_quantized(replace(read, shape=tuple(other.shape)), packed, other, arguments)
        default = results.get("", {})
        results[key] = {name: text for name, text in all_as_text(packed.tensors).items() if default.get(name) != text}
        results[key] |= {name: "" for name in default if name not in packed.tensors}
    return {"storage": case.storage, "params": params, "shape": list(shape), "seed": seed, "low": low, "high": high,
            "step": step, **few, "weight": as_text(weight), "results": results}


# -- proving ----------------------------------------------------------------------------------------------------------


def codes(tensor: Tensor, bits: int) -> Codes:
    """The elements of a tensor as their bits."""
    size = tensor.element_size()
    data = raw(tensor).numpy().view(f"<u{size}")
    return data.astype(np.int64).reshape(tuple(tensor.shape)) & (1 << bits) - 1


def field_codes(read: Reading, fields: Mapping[str, Tensor]) -> dict[str, Codes]:
    return {name: codes(field, oracle.field_bits(read.spec, name, read.params)) for name, field in fields.items()}


def prove_stored(read: Reading, packed: PackedWeight) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(fields, tensors packed again) of the code, which are those of the second reading.

    Fields are right if packing them bit by bit, as the spec says, gives the stored bits: two fields never have the same.
    Bytes of base-3 digits are told apart by their digits alone.
    """
    fields = packed.format.unpack(packed)
    stored_shape = packed.layout.shape
    if stored_shape and packed.tensors[stored_shape].tolist() != list(read.shape):
        raise Disagreement(f"{read.spec.name}.{read.storage}: '{stored_shape}' says another shape")
    like = {name: tuple(tensor.shape) for name, tensor in packed.tensors.items() if name != stored_shape}
    own, used = read.pack(field_codes(read, fields), like)
    sizes = {name: oracle.element_bits(read.tensors[name], read.params) for name in like}
    stored = read.canonical({name: codes(packed.tensors[name], sizes[name]) for name in like})
    again = packed_again(packed, fields)
    for name, size in sizes.items():
        if not np.array_equal(stored[name] & used[name], own[name] & used[name]):
            raise Disagreement(f"{read.spec.name}.{read.storage}: unpack reads '{name}' otherwise than the second reading")
        if not np.array_equal(codes(again[name], size), own[name]):
            raise Disagreement(f"{read.spec.name}.{read.storage}: pack writes '{name}' otherwise than the second reading")
    return fields, again


def prove_decoded(read: Reading, packed: PackedWeight, fields: Mapping[str, Tensor]) -> Tensor:
    """The weights of the code, which are those of the second reading of decode."""
    weight = canonical(packed.format.dequantize(packed, torch.float32))
    if as_text(weight) != as_text(canonical(torch.from_numpy(read.decode(field_codes(read, fields))))):
        raise Disagreement(f"{read.spec.name}.{read.storage}: dequantize differs from the second reading of decode")
    return weight


def prove_refused(read: Reading, format: Format) -> bool:
    """Whether a shape is refused, by the code and by the second reading."""
    if known_answers.refuses(format, read.storage, read.params, read.shape) == read.holds():
        raise Disagreement(f"{read.spec.name}.{read.storage}: {read.shape} is {'' if read.holds() else 'not '}refused")
    return not read.holds()


def default_code(read: Reading, name: str) -> int:
    """The code of a field that no tensor holds."""
    default = oracle.evaluate(read.defaults[name], read.env)
    return nearest("f32", np.float32(default)) if read.kind(name) == "f32" else default


def prove_quantized(read: Reading, packed: PackedWeight, weight: Tensor, chosen: Mapping[str, Any]) -> None:
    """The quantized fields are those of the second reading of the encode scheme, and are stored as it stores them."""
    fields, again = prove_stored(read, packed.decode_streams())
    packed_codes = field_codes(read, fields)
    for name, expected in read.encode(weight.numpy(), chosen).items():
        left_out = name not in packed_codes and bool((expected == default_code(read, name)).all())
        if not left_out and not np.array_equal(packed_codes.get(name, ()), expected):
            raise Disagreement(f"{read.spec.name}: quantize({chosen or ''}) chooses another '{name}' than the second reading")
    if all_as_text(again) != all_as_text(packed.decode_streams().tensors):
        raise Disagreement(f"{read.spec.name}.{read.storage}: quantize does not write what pack writes")
