"""GGUF files: gguf-py and this package read what the other writes, and tensors are weights."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qdsl.checkpoint.checkpoint import open_checkpoint
from qdsl.checkpoint.detect.gguf_weights import module_of, packed_weight
from qdsl.checkpoint.files.ggml_types import BY_NAME, REMOVED, TORCH, TYPES, WEIGHTLESS, type_of
from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.gguf_write import NewTensor, write
from qdsl.checkpoint.files.safetensors import CheckpointError
from tests.support.files import stored
from tests.support.formats import ROOT, SHIPPED, same_bits, spec

F32, Q8_0 = BY_NAME["F32"], BY_NAME["Q8_0"]
# The specs that say of which type they are.
FORMATS = {match[1]: path.stem for path in SHIPPED if (match := re.search(r"\bgguf: (\w+)", path.read_text()))}
REPACKED = {str(type): (path.stem, str(storage)) for path in SHIPPED
            for type, storage in dict(spec(path).detect.get("repacked", {})).items()}    # type: ignore[arg-type]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file that the examples of a property write again and again."""
    return tmp_path_factory.mktemp("gguf") / "x.gguf"


# -- types -------------------------------------------------------------------------------------------------------------


def test_types_are_what_the_specs_say() -> None:
    """Every type but those that hold no weights has one spec, which says so, with its bytes and its bits."""
    rules = [(str(detect["gguf"]), path) for path in SHIPPED if "gguf" in (detect := spec(path).detect)]
    assert {name: path.stem for name, path in rules} == FORMATS and len(rules) == len(FORMATS)
    assert BY_NAME.keys() - FORMATS.keys() == {*WEIGHTLESS, *REPACKED}
    assert {name: module.__name__.split(".")[-1] for name in FORMATS if (module := module_of(name))} == FORMATS
    for name, path in rules:
        claims = {claim.name.value: claim.value for claim in spec(path).claims}
        assert claims["bits-per-weight"] == BY_NAME[name].bits
        assert BY_NAME[name].elements == 1 or BY_NAME[name].head or claims["bytes"] == BY_NAME[name].nbytes


def test_types_are_what_gguf_py_says() -> None:
    sizes = {type.name: gguf.GGML_QUANT_SIZES[type] for type in gguf.GGMLQuantizationType}
    sizes["Q8_1"] = (32, 36)                                     # it has an older Q8_1, with scales of 32 bits
    assert {name: (type.elements, type.nbytes) for name, type in BY_NAME.items() if name in sizes} == sizes
    assert {type.name: type.value for type in gguf.GGMLQuantizationType} == {n: t.id for n, t in BY_NAME.items() if n in sizes}
    assert sorted([*TYPES, *REMOVED])[:43] == list(range(43))
    for name, dtype in TORCH.items():
        assert getattr(torch, dtype).itemsize == BY_NAME[name].nbytes
    assert not type_of(4).is_readable and not type_of(99).is_readable


# Types of ik_llama.cpp as its ggml.h numbers them, with its sizes of a row of 512 elements (ggml_row_size).
IK_ROWS = {"IQ2_K": (137, 152), "IQ3_K": (138, 220),
           "IQ4_K": (139, 288), "IQ5_K": (140, 352), "IQ4_KS": (144, 276), "IQ4_KSS": (146, 260)}


@pytest.mark.parametrize("name", IK_ROWS)
def test_files_of_ik_llama(place: Path, name: str) -> None:
    """Rows of its types, with heads or without, are read, placed one after the other, and decoded to its own values."""
    id, size = IK_ROWS[name]
    type = type_of(id)
    assert type.name == name and type.row_bytes(512) == size
    with np.load(ROOT / "tests" / "data" / "sections" / f"ik_{name.lower()}.npz") as file:
        raw, expected = next(file[key] for key in file.files if key != "expected"), torch.from_numpy(file["expected"])
    shape = tuple(expected.shape)
    write(place, {}, [NewTensor("a.weight", type, shape, [raw.tobytes()]), NewTensor("b.weight", type, shape, [raw.tobytes()])])
    with GgufFile(place) as file:
        assert not file.notes and file.entry("b.weight").nbytes == shape[0] * type.row_bytes(shape[1])
        for packed in (packed_weight(file, "b.weight"), open_checkpoint(place).weight("a")):
            assert same_bits(packed.format.dequantize(packed, torch.float32), expected)
        rows = packed_weight(file, "b.weight", start=1, stop=2)
        assert same_bits(rows.format.dequantize(rows, torch.float32), expected[1:2])


# -- round trips -------------------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=15)
NUMBERS = {"u8": (0, 8), "i8": (1, 8), "u16": (0, 16), "i16": (1, 16), "u32": (0, 32), "i32": (1, 32),
           "u64": (0, 64), "i64": (1, 64)}


def contents(type: str) -> st.SearchStrategy[object]:
    if type in NUMBERS:
        signed, bits = NUMBERS[type]
        return st.integers(-(1 << bits - 1) if signed else 0, (1 << bits - signed) - 1)
    return {"bool": st.booleans(), "string": st.text(st.characters(codec="utf-8"), max_size=8),
            "f32": st.floats(width=32, allow_nan=False), "f64": st.floats(allow_nan=False)}[type]


@st.composite
def values(draw: st.DrawFn) -> tuple[str, object]:
    type = draw(st.sampled_from([*NUMBERS, "bool", "string", "f32", "f64"]))
    if draw(st.booleans()):
        return type, draw(contents(type))
    return f"{type}[]", draw(st.lists(contents(type), max_size=4))


@st.composite
def tensors(draw: st.DrawFn, names: st.SearchStrategy[str] = NAMES) -> tuple[str, str, tuple[int, ...], bytes]:
    type = draw(st.sampled_from(sorted(BY_NAME)))
    lead = draw(st.lists(st.integers(0, 3), max_size=3))
    shape = (*lead, draw(st.integers(0, 2)) * BY_NAME[type].elements)
    size = math.prod(lead) * BY_NAME[type].row_bytes(shape[-1])
    data = draw(st.binary(min_size=size, max_size=size)) if size < 99 else (bytes(range(256)) * (size // 256 + 1))[:size]
    return draw(names), type, shape, data


def new(name: str, type: str, shape: tuple[int, ...], data: bytes) -> NewTensor:
    """A tensor whose bytes come in pieces of 7."""
    return NewTensor(name, BY_NAME[type], shape, (data[at:at + 7] for at in range(0, len(data), 7)))


def copy(file: GgufFile, path: Path) -> None:
    write(path, file.metadata.stored(),
          [NewTensor(name, tensor.type, tensor.shape, [file.data(name)]) for name, tensor in file.tensors.items()])


METADATA = st.dictionaries(NAMES.filter(lambda key: not key.startswith(("general.", "split."))), values(), max_size=4)


@settings(max_examples=50, deadline=None)
@given(METADATA, st.lists(tensors(), max_size=4, unique_by=lambda tensor: tensor[0]), st.sampled_from([None, 1, 32, 64]))
def test_what_is_written_is_read(place: Path, metadata: dict[str, tuple[str, object]],
                                 drawn: list[tuple[str, str, tuple[int, ...], bytes]], alignment: int | None) -> None:
    wanted = {key: Value.of(*pair) for key, pair in metadata.items()}
    wanted |= {} if alignment is None else {"general.alignment": Value.of("u32", alignment)}
    write(place, wanted, [new(*fields) for fields in drawn])
    with GgufFile(place) as file:
        assert file.notes == () and file.alignment == (alignment or 32)
        assert file.metadata.stored() == wanted and list(file.metadata) == list(wanted)
        assert {key: file.metadata[key] for key in metadata} == {key: pair[1] for key, pair in metadata.items()}
        assert [(name, tensor.type.name, tensor.shape, bytes(file.data(name))) for name, tensor in file.tensors.items()] == drawn
        assert all(tensor.problem is None and tensor.start % file.alignment == 0 for tensor in file.tensors.values())
        again = place.with_suffix(".copy")
        copy(file, again)
        assert again.read_bytes() == place.read_bytes()


GGUF_TYPES = [type.name for type in gguf.GGMLQuantizationType if type.name != "Q8_1"]


@settings(max_examples=50, deadline=None)
@given(METADATA, st.lists(tensors().filter(lambda t: t[1] in GGUF_TYPES), max_size=4, unique_by=lambda t: t[0]))
def test_gguf_py_reads_what_we_write(place: Path, metadata: dict[str, tuple[str, object]],
                                     drawn: list[tuple[str, str, tuple[int, ...], bytes]]) -> None:
    write(place, {key: Value.of(*pair) for key, pair in metadata.items()}, [new(*fields) for fields in drawn])
    reader = gguf.GGUFReader(place)
    for key, (type, content) in metadata.items():
        if not type.endswith("[]") or content:                   # it finds no type for an array of nothing
            assert reader.fields[key].contents() == content
    read = [(t.name, t.tensor_type.name, tuple(t.shape.tolist()[::-1]), t.data.tobytes()) for t in reader.tensors]
    assert read == drawn


@settings(max_examples=40, deadline=None)
@given(METADATA, st.lists(tensors().filter(lambda t: t[1] in GGUF_TYPES and 0 not in t[2]), max_size=4,
                          unique_by=lambda t: t[0]))
def test_we_read_what_gguf_py_writes_and_write_the_same_bytes(place: Path, metadata: dict[str, tuple[str, object]],
                                                              drawn: list[tuple[str, str, tuple[int, ...], bytes]]) -> None:
    theirs = place.with_suffix(".theirs")
    writer = gguf.GGUFWriter(theirs, "llama")
    for key, (type, content) in metadata.items():
        if type.endswith("[]"):
            if not content:
                continue                                         # it has no arrays of nothing
            writer.add_key_value(key, content, gguf.GGUFValueType.ARRAY, getattr(gguf.GGUFValueType, VALUE_TYPES[type[:-2]]))
        else:
            writer.add_key_value(key, content, getattr(gguf.GGUFValueType, VALUE_TYPES[type]))
    for name, type, shape, data in drawn:
        raw = np.frombuffer(data, np.uint8).reshape(*shape[:-1], -1)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(theirs) as file:
        assert file.notes == ()
        metadata_read = {key: value for key, value in file.metadata.items() if key != "general.architecture"}
        assert metadata_read == {key: content for key, (type, content) in metadata.items() if not type.endswith("[]") or content}
        assert [(name, tensor.type.name, tensor.shape, bytes(file.data(name))) for name, tensor in file.tensors.items()] == drawn
        copy(file, place)
    assert place.read_bytes() == theirs.read_bytes()


VALUE_TYPES = {"u8": "UINT8", "i8": "INT8", "u16": "UINT16", "i16": "INT16", "u32": "UINT32", "i32": "INT32", "u64": "UINT64",
               "i64": "INT64", "f32": "FLOAT32", "f64": "FLOAT64", "bool": "BOOL", "string": "STRING"}


# -- as weights --------------------------------------------------------------------------------------------------------


def blocks(type: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random blocks [rows, bytes] whose float16 scales are moderate: random bytes with every second one of 0x1f at most."""
    drawn = np.random.default_rng(seed).integers(0, 256, (rows, BY_NAME[type].row_bytes(columns)), dtype=np.uint8)
    drawn[:, 1::2] &= 0x3F
    if type == "MXFP4":
        drawn[:, ::17] = 120                                     # its scale is one byte, and may be 2^127
    return drawn


@pytest.mark.parametrize("type", REPACKED)
def test_rows_in_turn_are_read_as_other_programs_write_them(place: Path, type: str) -> None:
    """The bytes of ik_llama.cpp and llama.cpp, their values, and any rows of them; converted, those of the plain type."""
    format, storage = REPACKED[type]
    with np.load(ROOT / "tests" / "data" / "repacked.npz") as file:
        rows, plain, values = (file[name] for name in (type, format, f"{format}_values"))
    write(place, {}, [NewTensor("a.weight", BY_NAME[type], (2, 8, 96), [rows.tobytes()])])
    with GgufFile(place) as gguf_file:
        packed = packed_weight(gguf_file, "a.weight")
        assert packed.storage == storage and next(iter(packed.tensors.values())).numpy().tobytes() == rows.tobytes()
        assert same_bits(packed.format.dequantize(packed, torch.float32), torch.from_numpy(values))
        other = packed.format.convert(packed, "gguf")
        assert other.tensors["blocks"].numpy().tobytes() == plain.tobytes()
        assert packed.format.convert(other, storage).tensors["blocks"].numpy().tobytes() == rows.tobytes()
        for expert, start, stop, wanted in ((None, 3, 10, values[3:10]), (1, 0, None, values[8:]), (1, 2, 5, values[10:13])):
            part = packed_weight(gguf_file, "a.weight", expert, start, stop)
            assert same_bits(part.format.dequantize(part, torch.float32), torch.from_numpy(wanted))
    with open_checkpoint(place) as checkpoint:
        layer = checkpoint.layers["a"]
        assert (layer.format, layer.storage, layer.experts) == (format, storage, 2)
    write(place, {}, [NewTensor("a.weight", BY_NAME[type], (6, 96), [rows[:6].tobytes()])])
    with GgufFile(place) as gguf_file, pytest.raises(CheckpointError, match=r"N = 6 must be a multiple of [48]"):
        packed_weight(gguf_file, "a.weight")


DECODED = [name for name in GGUF_TYPES if name not in ("Q8_K", "Q1_0") and name in FORMATS.keys() - TORCH.keys()]


@pytest.mark.parametrize("type", DECODED)
def test_weights_are_what_gguf_py_makes_of_them(place: Path, type: str) -> None:
    raw = blocks(type, 6, 512)
    write(place, {}, [NewTensor("a.weight", BY_NAME[type], (2, 3, 512), [raw.tobytes()])])
    with GgufFile(place) as file:
        packed = packed_weight(file, "a.weight")
        assert packed.shape == (6, 512) and packed.format.spec.detect["gguf"] == type
        assert next(iter(packed.tensors.values())).numpy().tobytes() == raw.tobytes()
        wanted = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[type]))
        weights = packed.format.dequantize(packed, torch.float32)
        assert same_bits(weights.nan_to_num(), wanted.nan_to_num())
        packed = packed_weight(file, "a.weight", 1)
        assert same_bits(packed.format.dequantize(packed, torch.float32), weights[3:])
        for expert in (-1, 2):
            with pytest.raises(CheckpointError, match=rf"\[2, 3, 512\] has no expert {expert}"):
                packed_weight(file, "a.weight", expert)
        with pytest.raises(CheckpointError, match=f"{type} is stored in blocks"):
            file.tensor("a.weight")


@pytest.mark.parametrize("type", sorted(TORCH))
def test_tensors_of_plain_numbers(place: Path, type: str) -> None:
    wanted = torch.arange(24).to(getattr(torch, TORCH[type])).view(2, 3, 4)
    data = wanted.view(torch.uint8).numpy().tobytes()
    write(place, {"comfy.gguf.orig_shape.b": Value.of("i32[]", [4, 6])},
          [NewTensor("a", BY_NAME[type], (2, 3, 4), [data]), NewTensor("b", BY_NAME[type], (24,), [data])])
    with GgufFile(place) as file:
        assert same_bits(file.tensor("a"), wanted) and same_bits(file.tensor("b"), wanted.view(4, 6))
        if type in WEIGHTLESS:
            with pytest.raises(CheckpointError, match=f"tensor 'a': {type} is not the type of a weight"):
                packed_weight(file, "a")
        else:
            packed = packed_weight(file, "a")
            assert same_bits(packed.format.dequantize(packed, wanted.dtype), wanted.view(6, 4))


def test_scales_beside_weights(place: Path) -> None:
    """NVFP4: one number for a weight, one for each expert; the same name beside another type is a tensor of its own."""
    raw = blocks("NVFP4", 6, 64)
    plain = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType.NVFP4))
    scales = np.array([2, 4], np.float32)
    write(place, {}, [NewTensor("one.weight", BY_NAME["NVFP4"], (6, 64), [raw.tobytes()]),
                      NewTensor("one.scale", F32, (1,), [scales[:1].tobytes()]),
                      NewTensor("two.weight", BY_NAME["NVFP4"], (2, 3, 64), [raw.tobytes()]),
                      NewTensor("two.scale", F32, (2,), [scales.tobytes()]),
                      NewTensor("no.weight", BY_NAME["NVFP4"], (6, 64), [raw.tobytes()])])
    with GgufFile(place) as file:
        def weight(name: str, expert: int | None = None) -> torch.Tensor:
            packed = packed_weight(file, name, expert)
            return packed.format.dequantize(packed, torch.float32)

        assert same_bits(weight("no.weight"), plain) and same_bits(weight("one.weight"), 2 * plain)
        assert same_bits(weight("two.weight", 0), 2 * plain[:3]) and same_bits(weight("two.weight", 1), 4 * plain[3:])
        with pytest.raises(CheckpointError, match=r"tensor 'two\.weight': .*scale"):
            packed_weight(file, "two.weight")


def test_tensors_outlive_the_file_and_never_change_it(place: Path) -> None:
    write(place, {}, [NewTensor("a", F32, (3,), [np.ones(3, np.float32)])])
    before = place.read_bytes()
    with GgufFile(place) as file:
        file.tensor("a").add_(1)
        tensor, data = file.tensor("a"), file.data("a")
    assert tensor.tolist() == [2, 2, 2] and bytes(data) == tensor.numpy().tobytes() and place.read_bytes() == before
    for read in (file.data, file.tensor, partial(packed_weight, file)):
        with pytest.raises(CheckpointError, match="the file is closed"):
            read("a")
    with pytest.raises(CheckpointError, match=r"no tensor 'b\\n'"):
        file.entry("b\n")


# -- sets of files -----------------------------------------------------------------------------------------------------


def shard(number: int, count: int, total: int, *names: str) -> tuple[dict[str, Value], list[NewTensor]]:
    keys = {"k": Value.of("u8", number), "split.no": Value.of("u16", number), "split.count": Value.of("u16", count),
            "split.tensors.count": Value.of("i32", total)}
    return keys, [NewTensor(name, F32, (1,), [np.float32(ord(name)).tobytes()]) for name in names]


def split(folder: Path, *shards: tuple[dict[str, Value], list[NewTensor]], name: str = "m") -> Path:
    for number, shard in enumerate(shards, 1):
        write(folder / f"{name}-{number:05d}-of-{len(shards):05d}.gguf", *shard)
    return folder / f"{name}-00001-of-{len(shards):05d}.gguf"


def test_a_set_of_files_is_one(tmp_path: Path) -> None:
    with GgufFile(split(tmp_path, shard(0, 3, 4, "a"), shard(1, 3, 4, "b", "c"), shard(2, 3, 4, "d"))) as file:
        assert dict(file.metadata) == {"k": 0}
        assert {name: file.tensor(name).item() for name in file.tensors} == {name: ord(name) for name in "abcd"}
        assert [tensor.shard for tensor in file.tensors.values()] == [0, 1, 1, 2] and len(file.paths) == 3
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf: file 2 of 3; give the first of them"):
        GgufFile(tmp_path / "m-00002-of-00003.gguf")


@pytest.mark.parametrize(("second", "reason"), [
    (shard(0, 2, 2, "b"), r"m-00002-of-00002\.gguf: split\.no, .* are 0, 2, 2; .* must have 1, 2, 2"),
    (shard(1, 3, 2, "b"), r"are 1, 3, 2; .* must have 1, 2, 2"), (shard(1, 2, 3, "b"), r"are 1, 2, 3; .* must have 1, 2, 2"),
    (({}, shard(1, 2, 2, "b")[1]), r"are 0, 1, 1; .* must have 1, 2, 2"),
    (shard(1, 2, 2, "b", "c"), r"split\.tensors\.count is 2, but the 2 files have 3"),
    (shard(1, 2, 2), r"split\.tensors\.count is 2, but the 2 files have 1"),
    (shard(1, 2, 2, "a"), r"m-00002-of-00002\.gguf: tensor 'a' occurs in m-00001-of-00002\.gguf too"),
    (shard(5, 2, 2, "b"), r"m-00002-of-00002\.gguf: split\.no is 5, split\.count 2"),
])
def test_a_set_that_does_not_fit_is_refused(tmp_path: Path, second: tuple[dict[str, Value], list[NewTensor]],
                                            reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        GgufFile(split(tmp_path, shard(0, 2, 2, "a"), second))


def test_sets_are_found_by_their_names(tmp_path: Path) -> None:
    first = split(tmp_path, shard(0, 2, 2, "a"), shard(1, 2, 2, "b"))
    (tmp_path / "m-00002-of-00002.gguf").rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf, file 2 of 2, is missing"):
        GgufFile(first)
    first.rename(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"m\.gguf: the first of 2 files; its name must end in -00001-of-00002\.gguf"):
        GgufFile(tmp_path / "m.gguf")
    for key, value in {"split.no": ("string", "0"), "split.count": ("i32", -1), "split.tensors.count": ("bool", True)}.items():
        write(tmp_path / "x.gguf", {key: Value.of(*value)}, [])
        with pytest.raises(CheckpointError, match=rf"x\.gguf: {key} is "):
            GgufFile(tmp_path / "x.gguf")


# -- writing -----------------------------------------------------------------------------------------------------------

ONE = [NewTensor("a", F32, (1,), [bytes(4)])]
REFUSED: dict[str, tuple[dict[str, Value], list[NewTensor], str]] = {
    "empty name": ({}, [NewTensor("", F32, (1,), [bytes(4)])], "a tensor's name of 0 bytes"),
    "long name": ({}, [NewTensor("n" * 64, F32, (1,), [bytes(4)])], "a name of 64 bytes; readers of architecture 'None' take 63"),
    "long name of an LLM": ({"general.architecture": Value.of("string", "llama")}, [NewTensor("ü" * 32, F32, (1,), [bytes(4)])],
                            "a name of 64 bytes; readers of architecture 'llama' take 63"),
    "long name of a diffusion model": ({"general.architecture": Value.of("string", "wan")},
                                       [NewTensor("n" * 128, F32, (1,), [bytes(4)])], "a tensor's name of 128 bytes; it has"),
    "NUL": ({}, [NewTensor("a\0", F32, (1,), [bytes(4)])], "has a NUL in its name"),
    "surrogate": ({}, [NewTensor("\ud800", F32, (1,), [bytes(4)])], "half of a surrogate pair"),
    "surrogate in a key": ({"\ud800": Value.of("u8", 1)}, ONE, "half of a surrogate pair"),
    "name twice": ({}, [*ONE, *ONE], "tensor 'a' occurs twice"),
    "empty key": ({"": Value.of("u8", 1)}, ONE, "a metadata key of 0 bytes"),
    "alignment": ({"general.alignment": Value.of("u32", 48)}, ONE, "general.alignment must be"),
    "6 dimensions": ({}, [NewTensor("a", F32, (1,) * 6, [bytes(4)])], "has 6 dimensions"),
    "plain text as the architecture": ({"general.architecture": "llama"}, [], "is a GgufValue, such as GgufValue.of"),
    "negative length": ({}, [NewTensor("a", F32, (-1,), [])], r"F32 \[-1\] is not stored"),
    "too large": ({}, [NewTensor("a", F32, (1 << 40, 1 << 40), [])], "is not stored"),
    "too large beside a zero": ({}, [NewTensor("a", F32, (1 << 70, 0), [])], "is not stored"),
    "removed type": ({}, [NewTensor("a", type_of(4), (32,), [bytes(18)])], r"removed Q4_2 \[32\] is not stored"),
    "half a block": ({}, [NewTensor("a", Q8_0, (2, 16), [bytes(34)])], "rows of 16 elements are not made of Q8_0's blocks of 32"),
    "too few bytes": ({}, [NewTensor("a", F32, (2,), [bytes(4), bytes(3)])], "takes 8 bytes, but got 7"),
    "too many bytes": ({}, [NewTensor("a", F32, (2,), [bytes(4), bytes(5)])], "takes 8 bytes, but got more"),
    "orig_shape": ({"comfy.gguf.orig_shape.a": Value.of("i32[]", [2])}, ONE, "its orig_shape is no"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_read_is_not_written(tmp_path: Path, case: str) -> None:
    metadata, tensors, reason = REFUSED[case]
    path = stored(tmp_path / "x.gguf", b"old")
    with pytest.raises(CheckpointError, match=rf"x\.gguf: .*{reason}"):
        write(path, metadata, tensors)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.gguf"]


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()])
def test_an_error_in_the_middle_leaves_the_old_file_alone(tmp_path: Path, error: BaseException) -> None:
    def pieces() -> Iterator[bytes]:
        yield bytes(4)
        raise error

    path = stored(tmp_path / "x.gguf", b"old")
    with pytest.raises(type(error)):
        write(path, {}, [NewTensor("a", F32, (2,), pieces())])
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.gguf"]


def test_tensors_are_written_in_pieces(place: Path) -> None:
    """One piece at a time is in memory, and none before the tensors before it are written."""
    size, order = 1 << 16, []

    def pieces(name: str) -> Iterator[bytes]:
        for number in range(64):
            order.append(name)
            yield bytes([number]) * size

    drawn = [NewTensor(name, BY_NAME["I8"], (64, size), pieces(name)) for name in "ab"]
    tracemalloc.start()
    write(place, {}, drawn)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * size and order == ["a"] * 64 + ["b"] * 64
    with GgufFile(place) as file:
        assert bytes(file.data("b")[-2 * size:]) == bytes([62]) * size + bytes([63]) * size


def test_long_names_of_diffusion_models(place: Path) -> None:
    for architecture in ("flux", "qwen_image"):
        write(place, {"general.architecture": Value.of("string", architecture)}, [NewTensor("n" * 127, F32, (1,), [bytes(4)])])
        with GgufFile(place) as file:
            assert list(file.tensors) == ["n" * 127]


def test_reading_a_header_imports_neither_torch_nor_numpy(place: Path) -> None:
    write(place, {"k": Value.of("string", "v")}, ONE)
    program = ("import sys\n"
               "from qdsl.checkpoint.files.gguf import GgufFile\n"
               "from qdsl.checkpoint.files.gguf_write import NewTensor, write\n"
               "with GgufFile(sys.argv[1]) as file:\n"
               "    assert dict(file.metadata) == {'k': 'v'} and bytes(file.data('a')) == bytes(4)\n"
               "    write(sys.argv[1], {}, [NewTensor('a', file.tensors['a'].type, (1,), [file.data('a')])])\n"
               "assert not {'torch', 'numpy', 'gguf'} & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", program, str(place)], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0
