"""Known answers: the exact bits of small weights of a format, kept in files, and their comparison with the format's results.

An array is written as text: dtype[shape] and its bytes in hex; for a long array, the first bytes and half the SHA-256 of all.
tests/support/blessing.py makes the files and proves them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qdsl.compiler.passes.derive_planar import PLANAR
from qdsl.runtime import PackedWeight
from qdsl.runtime.format import Format
from qdsl.runtime.weight.defaults import default_field
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import FormatError
from tests.support.formats import raw

MEND = "run `pytest tests/formats/test_answers.py --bless` and read the difference"
FOLDER = Path(__file__).resolve().parents[1] / "data" / "answers"
ABOUT = {
    "bytes": "from x = seed, x = (1103515245 * x + 12345) mod 2^31; each x gives a byte, its bits 16 to 23; the tensors of a "
             "case begin at seed, seed + 1, ...; an index is its four bytes, little-endian, modulo 2^31 and the groups",
    "weight": "step * h / 2, h = low + (two bytes, little-endian) mod (high - low + 1); h is low where k mod 16 is "
              "8 * (n mod 2), and high 8 columns from there; rows with n mod 4 = 3 are 0 in even columns and -0 in odd ones",
    "says": "the tensor that holds the shape",
    "refused": "shapes that the storage cannot hold; refused whole: with groups of whole rows",
    "NaN": "told as 7fc00000",
    "results": "what quantize makes by default, and which tensors become others ('': none) by an option, by an importance of "
               "columns, (1 + byte) / 64 from seed 7, of the weight times 2^-140, of the weight times 1 + (5 * n + k // 16) mod "
               "16 / 16 and, where (n + k // 16) mod 4 is 2, times 2^-24 (rows), of the weight by its largest magnitude times "
               "(1 - 2^-(m + 3)) * 2^-m, m = n mod 4 (edges), or of a weight of few integers: byte from seed 7 mod `integers`, "
               "less half of that",
}
# Keys of results beside options.
IMPORTANCE, TINY, INTEGERS, ROWS, EDGES = "importance", "times 2^-140", "integers", "rows", "edges"
Answers = dict[str, Any]


def kept(stem: str) -> Answers:
    """The file of a spec."""
    file = FOLDER / f"{stem}.json"
    assert file.is_file(), f"{stem}.yaml has no known answers: {MEND}"
    answers: Answers = json.loads(file.read_text())
    return answers


# -- data -------------------------------------------------------------------------------------------------------------


@cache
def stream(seed: int, count: int) -> npt.NDArray[np.uint8]:
    """The first `count` bytes of the generator."""
    out = np.empty(count, np.uint8)
    for i in range(count):
        seed = (1103515245 * seed + 12345) % (1 << 31)
        out[i] = seed >> 16 & 255
    return out


@cache
def weights(shape: tuple[int, int], seed: int, low: int, high: int, step: float) -> Tensor:
    """A float weight as ABOUT describes it: half steps from low to high, both ends in every 16 columns."""
    n, k = np.indices(shape)
    h = low + stream(seed, 2 * n.size).view("<u2").reshape(shape).astype(np.int64) % (high - low + 1)
    h = np.where(k % 16 == n % 2 * 8, low, np.where(k % 16 == 8 - n % 2 * 8, high, h))
    zero = np.where(k % 2 == 0, 0.0, -0.0)
    return torch.from_numpy(np.where(n % 4 == 3, zero, step * h / 2).astype(np.float32))


def as_text(tensor: Tensor, most: int = 1 << 62) -> str:
    """A tensor as text, with all bytes if they are `most` or fewer."""
    data = bytes(raw(tensor).numpy())
    head = f"{str(tensor.dtype)[6:]}[{','.join(map(str, tensor.shape))}] "
    return head + (data.hex() if len(data) <= most else f"{data[:8].hex()}... sha256 {hashlib.sha256(data).hexdigest()[:32]}")


def all_as_text(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: as_text(tensor) for name, tensor in tensors.items()}


def agrees(text: str, tensor: Tensor) -> bool:
    return text == as_text(tensor, -1 if "..." in text else 1 << 62)


def inputs(case: Answers) -> dict[str, Tensor]:
    """The stored tensors of a case: the generator's bytes in the dtypes and shapes that the file tells."""
    tensors: dict[str, Tensor] = {}
    for i, (name, text) in enumerate(case["tensors"].items()):
        kind, _, extents = text.partition("[")
        shape = [int(extent) for extent in extents.split("]")[0].split(",") if extent]
        dtype = getattr(torch, kind)
        if name == case.get("says"):
            tensors[name] = torch.tensor(case["shape"])
            continue
        data = stream(case["seed"] + i, int(np.prod(shape)) * dtype.itemsize)
        tensors[name] = torch.from_numpy(data).view(dtype).view(shape)
        if name == case.get("index"):
            tensors[name] = (tensors[name] & 0x7FFFFFFF) % case["groups"]
    return tensors


def as_data(tensor: Tensor) -> dict[str, Any]:
    """A tensor in full, however long the file is."""
    return {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "data": bytes(raw(tensor).numpy()).hex()}


def from_data(data: Mapping[str, Any]) -> Tensor:
    dtype: torch.dtype = getattr(torch, data["dtype"])
    return torch.frombuffer(bytearray.fromhex(data["data"]), dtype=dtype).view(data["shape"])


def canonical(weight: Tensor) -> Tensor:
    """One NaN for all: which bits a NaN has depends on the machine."""
    return torch.where(weight.isnan(), torch.nan, weight)


# -- a file and a format ----------------------------------------------------------------------------------------------


def differences(kept: Answers, format: Format) -> Iterator[str]:
    """What a format does otherwise than a file of known answers says, one after the other."""
    if kept["params"] != told_params(format) or kept["storages"] != list(format.storages) or \
            kept.get("lacking", {}) != told_lacking(format):
        yield "other parameters, storages or defaults"
    for case in kept["cases"]:
        yield from _stored(case, format)
    for case in kept["quantized"]:
        yield from _quantized(case, format)
    for case in kept.get("branches", ()):
        yield from _with_branches(case, format)


def _stored(case: Answers, format: Format) -> Iterator[str]:
    name = label(case)
    packed = wrapped(format, case)
    if list(case["tensors"]) != [key for key in packed.layout.tensors if key in packed.tensors]:
        yield f"{name}: other tensors, or in another order"
    yield from _compared(f"{name}: wrap", case["tensors"], packed.tensors)
    fields = format.unpack(packed)
    yield from _compared(f"{name}: unpack", case["fields"], fields)
    yield from _compared(f"{name}: pack", case["packed" if "packed" in case else "tensors"], packed_again(packed, fields))
    weight = canonical(format.dequantize(packed, torch.float32))
    yield from _compared(f"{name}: dequantize", {"weight": case["weight"]}, {"weight": weight})
    for key, params in ("refused", case["params"]), ("refused whole", whole(format, case["params"])):
        for n, k in case.get(key, ()):
            if not refuses(format, case["storage"], params, (n, k)):
                yield f"{name}: [{n}, {k}] is not {key}"


def _quantized(case: Answers, format: Format) -> Iterator[str]:
    n, k = case["shape"]
    weight = weights((n, k), case["seed"], case["low"], case["high"], case["step"])
    few = case.get("integers", 0)
    yield from _compared(f"{label(case)}: the weight to quantize", {"weight": case["weight"]}, {"weight": weight})
    for key, other in case["results"].items():
        packed = format.quantize(changed_weight(weight, key, few), storage=case["storage"], **case["params"], **options(key, k))
        wanted = {name: text for name, text in {**case["results"][""], **other}.items() if text}
        yield from _compared(f"{label(case)}: quantize({key})", wanted, packed.tensors)


def _with_branches(case: Answers, format: Format) -> Iterator[str]:
    """A weight with side branches, whose tensors the file has in full."""
    tensors = {**inputs(case), **{name: from_data(data) for name, data in case["added"].items()}}
    n, k = case["shape"]
    packed = format.wrap(tensors, (n, k), case["storage"], **case["params"])
    fields = format.unpack(packed)
    name = f"{label(case)} with branches"
    yield from _compared(f"{name}: unpack", case["fields"], {role: fields[role] for role in case["fields"] if role in fields})
    again = format.pack(fields, case["storage"], **case["params"]).tensors
    yield from _compared(f"{name}: pack", case.get("packed", all_as_text(tensors)), again)
    weight = canonical(format.dequantize(packed, torch.float32))
    yield from _compared(f"{name}: dequantize", {"weight": case["weight"]}, {"weight": weight})


def whole(format: Format, params: Mapping[str, int | str]) -> dict[str, int | str]:
    """The parameters with the whole axis for every block that may be that."""
    return {**params, **{name: -1 for name in format.size_axes if -1 in format.params[name]}}


def refuses(format: Format, storage: str, params: Mapping[str, int | str], shape: tuple[int, int]) -> bool:
    """Whether fields of zeros, whose last blocks may be short, are not packed as a weight of this shape."""
    sizes = format.sizes(params, shape)
    variant = format.variant(params)
    fields = {name: torch.zeros([axis.rounded(*shape, sizes) for axis in field.axes],
                                dtype=torch_dtype(str(params.get(field.type, field.type))))
              for name, field in variant.fields.items() if name not in variant.storages[storage].where}
    fields |= {name: default_field(format.description, variant, name, shape, params, torch.device("cpu"))
               for name in fields if variant.fields[name].type == "index"}       # one value for all means none
    try:
        return format.pack(fields, storage=storage, **params).shape != shape
    except FormatError:
        return True


def _compared(what: str, wanted: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    for name in {**wanted, **tensors}:
        if name not in wanted or name not in tensors or not agrees(wanted[name], tensors[name]):
            yield f"{what}: another '{name}'"


def label(case: Answers) -> str:
    """Storage, parameters and shape, as in 'gptq_v2 bits=4 group=32 [16, 40] without g_idx'."""
    shown = "".join(f" {key}={value}" for key, value in case["params"].items())
    return f"{case['storage']}{shown} {case['shape']}{' without ' + ', '.join(case['absent']) if case.get('absent') else ''}"


def changed_weight(weight: Tensor, key: str, few: int) -> Tensor:
    """The weight that a result is of; `few` integers make one of which the last trial of a search matters, here and there.

    Rows at edges: where powers of two begin to be rounded up, and of scales that are numbers of 8 bits, so that codes tie.
    """
    if key == INTEGERS:
        return torch.from_numpy(stream(7, 64 * 2048).reshape(64, 2048).astype(np.float32) % few - few // 2)
    if key == ROWS:
        n, k = np.indices(weight.shape)
        small = np.where((n + k // 16) % 4 == 2, 2.0 ** -24, 1)
        return weight * torch.from_numpy((small * (1 + (5 * n + k // 16) % 16 / 16)).astype(np.float32))
    if key == EDGES:
        row = np.arange(weight.shape[0])[:, None] % 4
        return weight / weight.abs().max() * torch.from_numpy(((1 - 2.0 ** -(row + 3)) * 2.0 ** -row).astype(np.float32))
    return weight * 2.0 ** -140 if key == TINY else weight


def options(key: str, columns: int) -> dict[str, Any]:
    """'by=exact', or an importance of columns, as an argument of quantize."""
    if key == IMPORTANCE:
        return {"importance": torch.from_numpy((1 + stream(7, columns).astype(np.float32)) / 64)}
    name, _, word = ("" if key in (TINY, INTEGERS, ROWS, EDGES) else key).partition("=")
    return {name: {"True": True, "False": False}.get(word, word)} if name else {}


def told_params(format: Format) -> dict[str, list[int | str]]:
    return {name: list(values) for name, values in format.params.items()}


def told_lacking(format: Format) -> dict[str, list[str]]:
    """The storages that there are not, by the parameters for which there are others."""
    lacking = {" ".join(f"{name}={value}" for name, value in zip(format.by, key, strict=True)):
               [name for name in format.storages if name not in (*variant.storages, PLANAR)]
               for key, variant in format.variants.items()}
    return {key: names for key, names in lacking.items() if names}


def packed_again(packed: PackedWeight, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that pack makes of fields; of a storage with streams what those hold, for not every code holds all bytes."""
    if packed.is_decoded:
        tensors = {name: tensor.contiguous() for name, tensor in packed.layout.pack(**fields).items()}
        return tensors | ({packed.layout.shape: torch.tensor(packed.shape)} if packed.layout.shape else {})
    return packed.format.pack(fields, storage=packed.storage, **packed.params).tensors


def wrapped(format: Format, case: Answers) -> PackedWeight:
    """A weight of a case's tensors; of a storage with streams these are what the streams hold."""
    n, k = case["shape"]
    if format.variant(case["params"]).storages[case["storage"]].streams:
        return PackedWeight(format, case["storage"], inputs(case), (n, k), case["params"], is_decoded=True)
    return format.wrap(inputs(case), shape=(n, k), storage=case["storage"], **case["params"])
