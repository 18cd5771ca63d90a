"""GGUF files: hostile ones are refused with their reason, gguf-py and this package read what the other writes."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qdsl.checkpoint.detect.gguf_weights import module_of, packed_weight
from qdsl.checkpoint.files import gguf_metadata
from qdsl.checkpoint.files.ggml_types import BY_NAME, REMOVED, TORCH, TYPES, WEIGHTLESS, type_of
from qdsl.checkpoint.files.gguf import GgufFile, Header, parse
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.gguf_write import NewTensor, write
from qdsl.checkpoint.files.safetensors import CheckpointError
from tests.support.files import stored, unreserved
from tests.support.formats import ROOT, SHIPPED, same_bits, spec
from tests.support.ggufs import array, framed, info, pair, text

F32, Q8_0 = BY_NAME["F32"], BY_NAME["Q8_0"]
# The specs that say of which type they are.
FORMATS = {match[1]: path.stem for path in SHIPPED if (match := re.search(r"\bgguf: (\w+)", path.read_text()))}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file that the examples of a property write again and again."""
    return tmp_path_factory.mktemp("gguf") / "x.gguf"


def parsed(data: bytes, size: int | None = None) -> Header:
    return parse(BytesIO(data), len(data) if size is None else size, Path("x.gguf"))


# -- types -------------------------------------------------------------------------------------------------------------


def test_types_are_what_the_specs_say() -> None:
    """Every type but those that hold no weights has one spec, which says so, with its bytes and its bits."""
    rules = [(str(detect["gguf"]), path) for path in SHIPPED if "gguf" in (detect := spec(path).detect)]
    assert {name: path.stem for name, path in rules} == FORMATS and len(rules) == len(FORMATS)
    assert BY_NAME.keys() - FORMATS.keys() == {*WEIGHTLESS}
    assert {name: module.__name__.split(".")[-1] for name in FORMATS if (module := module_of(name))} == FORMATS
    for name, path in rules:
        claims = {claim.name.value: claim.value for claim in spec(path).claims}
        assert claims["bits-per-weight"] == BY_NAME[name].bits
        assert BY_NAME[name].elements == 1 or claims["bytes"] == BY_NAME[name].nbytes


def test_types_are_what_gguf_py_says() -> None:
    sizes = {type.name: gguf.GGML_QUANT_SIZES[type] for type in gguf.GGMLQuantizationType}
    sizes["Q8_1"] = (32, 36)                                     # it has an older Q8_1, with scales of 32 bits
    assert {name: (type.elements, type.nbytes) for name, type in BY_NAME.items() if name in sizes} == sizes
    assert {type.name: type.value for type in gguf.GGMLQuantizationType} == {n: t.id for n, t in BY_NAME.items() if n in sizes}
    assert sorted([*TYPES, *REMOVED]) == list(range(43))
    for name, dtype in TORCH.items():
        assert getattr(torch, dtype).itemsize == BY_NAME[name].nbytes
    assert not type_of(4).is_readable and not type_of(99).is_readable


# -- what condemns a file ----------------------------------------------------------------------------------------------

HUGE = (1 << 63, (1 << 64) - 9, 1 << 40)
LLAMA = pair(b"general.architecture", "string", b"llama")
HOSTILE = {
    "nothing": (b"", "0 bytes; a GGUF file begins with 24 bytes"),
    "cut off": (framed()[:23], "23 bytes; a GGUF file begins"),
    "magic": (framed(magic=b"GGML"), r"byte 0: b'GGML' is not how a GGUF file begins"),
    "magic in small letters": (framed(magic=b"gguf"), "is not how a GGUF file begins"),
    "version 0": (framed(version=0), "byte 4: version 0; read are 2 and 3"),
    "version 1": (framed(version=1), "byte 4: version 1; read are 2 and 3"),
    "version 4": (framed(version=4), "byte 4: version 4; read are 2 and 3"),
    "big-endian": (framed(version=3 << 24), "byte 4: a big-endian file"),
    "big-endian version 2": (framed(version=2 << 24), "byte 4: a big-endian file"),
    "negative tensors": (framed(tensors=(1 << 64) - 1), "byte 8: 18446744073709551615 tensors are over the limit of 262144"),
    "negative keys": (framed(keys=1 << 63), "byte 16: 9223372036854775808 metadata keys are over the limit of 65536"),
    "more tensors than bytes": (framed(tensors=2) + bytes(39), "byte 8: 2 tensors take 24 bytes each at least, but 47 follow"),
    "more keys than bytes": (framed(keys=3) + bytes(30), "byte 16: 3 metadata keys take 13 bytes each at least, but 30 follow"),
    "a tensor that is missing": (framed([info()], tensors=2) + bytes(8), "a tensor's name of 0 bytes; it has 1 to 127"),
    "a key cut off": (framed(keys=1) + text(b"k", 6) + bytes(4), "byte 32: a metadata key of 6 bytes, but 5 follow"),
    "empty key": (framed(pairs=[pair(b"", "u8", 0)]), "byte 24: a metadata key of 0 bytes; it has 1 to 65535"),
    "long key": (framed(pairs=[pair(b"k" * 65536, "u8", 0)]), "a metadata key of 65536 bytes; it has 1 to 65535"),
    "key that is not UTF-8": (framed(pairs=[pair(b"k\xff", "u8", 0)]), "byte 32: a metadata key is not UTF-8"),
    "key twice": (framed(pairs=[pair(b"k", "u8", 0), pair(b"k", "u8", 0)]), "byte 38: metadata key 'k' occurs twice"),
    "type 13": (framed(pairs=[text(b"k") + struct.pack("<II", 13, 0)]), "byte 33: metadata 'k' has type 13, which"),
    "type 2^32 - 1": (framed(pairs=[text(b"k") + b"\xff" * 8]), "metadata 'k' has type 4294967295"),
    "value cut off": (framed(pairs=[pair(b"k", "u64", 0)])[:-1], "byte 37: 1 u64 take 8 bytes each at least, but 7 follow"),
    "no value": (framed(pairs=[pair(b"key", "u8", 0)])[:-1], "byte 39: 1 u8 take 1 bytes each at least, but 0 follow"),
    **{f"string of {length}": (framed(pairs=[text(b"k") + struct.pack("<I", 8) + text(b"abc", length)]),
                               "of 1 strings from here on, one passes the end of the header, 48") for length in (*HUGE, 4)},
    **{f"array of {length} {type}": (framed(pairs=[text(b"k") + array(type, length) + bytes(16)]),
                                     f"byte 49: {length} {type} take {size} bytes each at least, but 16 follow")
       for length in HUGE for type, size in (("u8", 1), ("f64", 8), ("string", 8), ("bool", 1))},
    "a string of an array passes the end": (framed(pairs=[text(b"k") + array("string", 2) + text(b"a") + text(b"b", 2)]),
                                            "byte 49: of 2 strings from here on, one passes the end of the header, 67"),
    "array of arrays": (framed(pairs=[text(b"k") + array("array", 1) + struct.pack("<IQ", 0, 0) * 2]),
                        "metadata 'k' has an array of arrays"),
    "array of type 13": (framed(pairs=[text(b"k") + array(13, 1) + bytes(8)]), "metadata 'k' has type 13"),
    **{f"alignment {value}": (framed(pairs=[pair(b"general.alignment", "u32", value)]),
                              f"general.alignment must be a u32, a power of two up to 1048576, not u32 '{value}'")
       for value in (0, 3, 48, 1 << 21, 1 << 31, (1 << 32) - 1)},
    "alignment of type u64": (framed(pairs=[pair(b"general.alignment", "u64", 32)]), r"not u64 '32'"),
    "alignment of type bool": (framed(pairs=[pair(b"general.alignment", "bool", True)]), r"not bool 'True'"),
    "alignments": (framed(pairs=[pair(b"general.alignment", "u32[]", [32])]), r"not u32\[\] '\[32\]'"),
    "no alignments": (framed(pairs=[pair(b"general.alignment", "u32[]", [])]), r"not u32\[\] '\[\]'"),
    "empty name": (framed([info(b"")]), "byte 24: a tensor's name of 0 bytes; it has 1 to 127"),
    "long name": (framed([info(b"n" * 128)]), "byte 24: a tensor's name of 128 bytes; it has 1 to 127"),
    "name past the end": (framed(tensors=1) + text(b"n", 100) + bytes(20), "byte 32: a tensor's name of 100 bytes, but 21 "),
    "name that is not UTF-8": (framed([info(b"\xc3\x28")]), "byte 32: a tensor's name is not UTF-8"),
    "NUL in a name": (framed([info(b"a\0")]), r"byte 24: tensor 'a\\x00' has a NUL in its name"),
    "name twice": (framed([info(), info()]), "byte 57: tensor 'a' occurs twice"),
    "6 dimensions": (framed([info(dims=[1] * 6)]), "byte 33: tensor 'a' has 6 dimensions, over the limit of 5"),
    "2^32 - 1 dimensions": (framed([info(rank=(1 << 32) - 1)]), "has 4294967295 dimensions, over the limit of 5"),
    "dimensions cut off": (framed([info(dims=[1], rank=5)]), "byte 53: a dimension of 8 bytes, but 4 follow"),
    "offset cut off": (framed([info()])[:-1], "byte 49: a tensor's offset of 8 bytes, but 7 follow"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_their_reason(place: Path, case: str) -> None:
    data, reason = HOSTILE[case]
    with pytest.raises(CheckpointError, match=rf"^.*x\.gguf: .*{reason}") as caught:
        GgufFile(stored(place, data))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


@pytest.mark.parametrize("length", range(24, len(framed([info(b"name")], [LLAMA, pair(b"k", "string[]", [b"a", b"b"])]))))
def test_a_header_that_is_cut_anywhere_is_refused(length: int) -> None:
    with pytest.raises(CheckpointError):
        parsed(framed([info(b"name")], [LLAMA, pair(b"k", "string[]", [b"a", b"b"])])[:length])


def test_what_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        GgufFile(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="not a regular file"):
        GgufFile(tmp_path)


@pytest.mark.parametrize(("limit", "reason"), [
    ("HEADER_LIMIT", "byte 56: 1 string take 8 bytes each at least, but 4 are left of the 60 of a header"),
    ("STRINGS_LIMIT", "byte 94: 61 strings are over the limit of 60"),
])
def test_limits_hold(monkeypatch: pytest.MonkeyPatch, limit: str, reason: str) -> None:
    monkeypatch.setattr(gguf_metadata, limit, 60)
    with pytest.raises(CheckpointError, match=reason):
        parsed(framed([info()], [LLAMA, pair(b"k", "string[]", [b""] * 60)]))


# -- what condemns a tensor --------------------------------------------------------------------------------------------

A, B = b"a", b"b"
PROBLEMS: dict[str, tuple[bytes, dict[str, str]]] = {
    "removed type": (framed([info(type=4), info(B)], data=bytes(128)), {"a": "removed Q4_2 is no type that can be read"}),
    "unknown type": (framed([info(type=43), info(B)], data=bytes(128)), {"a": "unknown 43 is no type that can be read"}),
    "rows of 33": (framed([info(dims=[33], type=2), info(B)], data=bytes(128)),
                   {"a": "rows of 33 elements are not made of Q4_0's blocks of 32"}),
    "rows of 16, a whole block in all": (framed([info(dims=[16, 2], type=2), info(B)], data=bytes(128)),
                                         {"a": "rows of 16 elements are not made of Q4_0's blocks of 32"}),
    "a scalar of blocks": (framed([info(dims=[], type=8), info(B)], data=bytes(128)), {"a": "rows of 1 elements"}),
    "negative dimension": (framed([info(dims=[1 << 63]), info(B)], data=bytes(128)), {"a": "its shape is too large"}),
    "elements wrap": (framed([info(dims=[1 << 32, 1 << 32]), info(B)], data=bytes(128)), {"a": "its shape is too large"}),
    "elements wrap to few": (framed([info(dims=[3, 1 << 62, 4]), info(B)], data=bytes(128)), {"a": "its shape is too large"}),
    "elements wrap beside a zero": (framed([info(dims=[0, 1 << 62, 4]), info(B)], data=bytes(128)), {"a": "too large"}),
    "bytes wrap": (framed([info(dims=[1 << 62]), info(B)], data=bytes(128)), {"a": "its bytes end at 18446744073709551712"}),
    "padding wraps": (framed([info(dims=[(1 << 62) - 1]), info(B)], data=bytes(128)), {"a": "its bytes end at 1844674407"}),
    "offset wraps": (framed([info(offset=(1 << 64) - 32), info(B)], data=bytes(128)), {"a": "its bytes end at 1844674407370955"}),
    "offset not aligned": (framed([info(offset=4), info(B, offset=128)], data=bytes(256)),
                           {"a": "offset 4 is no multiple of the alignment 32"}),
    "data past the end": (framed([info(), info(B, offset=128)], data=bytes(255)), {"b": "its bytes end at 352, the file at 351"}),
    "no data at all": (framed([info()]), {"a": "its bytes end at 192, the file at 57"}),
    "the same bytes twice": (framed([info(), info(B)], data=bytes(128)),
                             {"a": "overlaps tensor 'b'", "b": "overlaps tensor 'a'"}),
    "partial overlap": (framed([info(), info(B, offset=96), info(b"c", offset=224)], data=bytes(352)),
                        {"a": "overlaps tensor 'b'", "b": "overlaps tensor 'a'"}),
    "one inside another": (framed([info(dims=[96]), info(B, dims=[1], offset=64), info(b"c", dims=[1], offset=128)],
                                  data=bytes(384)),
                           {"a": "overlaps tensor 'b'", "b": "overlaps tensor 'a'", "c": "overlaps tensor 'a'"}),
    **{f"orig_shape {type} {shape}": (framed([info(), info(B, offset=128)], [pair(b"comfy.gguf.orig_shape.a", type, shape)],
                                             bytes(256)), {"a": "its orig_shape is no i32[] for as many elements as [32] has"})
       for type, shape in [("i32[]", [31]), ("i32[]", [2, 16, 2]), ("i32[]", []), ("i32[]", [-4, -8]), ("u32[]", [32]),
                           ("i32", 32), ("string", b"32"), ("i32[]", [32, 1, 1, 1, 1, 1]), ("string[]", [b"32"])]},
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_wrong_tensor_hides_no_other(place: Path, case: str) -> None:
    data, wanted = PROBLEMS[case]
    with GgufFile(stored(place, data)) as file:
        problems = {name: tensor.problem for name, tensor in file.tensors.items() if tensor.problem is not None}
        assert problems.keys() == wanted.keys()
        for name, problem in problems.items():
            assert wanted[name] in problem and problem.isprintable()
            for read in (file.data, file.tensor, partial(packed_weight, file), file.rows):
                with pytest.raises(CheckpointError, match=rf"x\.gguf: tensor '{name}': ") as caught:
                    read(name)
                assert problem in str(caught.value)
        for name in file.tensors.keys() - problems.keys():
            assert file.tensor(name).tolist() == [0.0] * file.tensors[name].shape[0]


NOTES = {
    "nothing": (framed([info(), info(B, offset=128)], data=bytes(256)), ()),
    "a gap": (framed([info(), info(B, offset=160)], data=bytes(288)), ("tensor 'b' begins at byte 256, not at 224 after",)),
    "another order": (framed([info(offset=128), info(B)], data=bytes(256)), ("tensor 'a' begins at byte 224, not at 96 after",)),
    "no padding": (framed([info(dims=[9])], data=bytes(36)), ("the last tensor is not padded: 28 bytes are missing",)),
    "bytes at the end": (framed([info()], data=bytes(130)), ("2 bytes follow the last tensor",)),
    "no such tensor": (framed([info()], [pair(b"comfy.gguf.orig_shape.b", "i32[]", [3])], bytes(128)),
                       ("metadata 'comfy.gguf.orig_shape.b': no such tensor",)),
    "no tensors": (framed(pairs=[LLAMA]), ()),
    "no tensors, but data": (framed(pairs=[LLAMA], data=bytes(32)), ("32 bytes follow the last tensor",)),
}


@pytest.mark.parametrize("case", NOTES)
def test_what_is_odd_and_harms_nobody_is_noted(case: str) -> None:
    data, notes = NOTES[case]
    header = parsed(data)
    assert len(header.notes) == len(notes) and all(note.startswith(head) for note, head in zip(header.notes, notes, strict=True))
    assert not any(tensor.problem for tensor in header.tensors.values())


def test_what_is_unusual_is_read() -> None:
    """No dimensions, empty ones, five of them, names as long as diffusion models', any bytes in strings, version 2."""
    header = parsed(framed(
        [info(b"scalar", []), info(b"empty", [0, 7], offset=32), info(b"video", [2, 2, 1, 48, 3], offset=32),
         info(b"n" * 127, [1], offset=2336)],
        [pair(b"s", "string", b"\xff\x1b[2J"), pair(b"b", "bool", True),
         pair(b"comfy.gguf.orig_shape.video", "i32[]", [3, 48, 1, 2, 2])],
        bytes(2368), version=2))
    assert header.version == 2 and header.notes == ()
    assert [tensor.shape for tensor in header.tensors.values()] == [(), (7, 0), (3, 48, 1, 2, 2), (1,)]
    assert all(tensor.problem is None for tensor in header.tensors.values())
    assert header.metadata["s"] == "\\xff\x1b[2J" and header.metadata["b"] is True


@pytest.mark.parametrize("type", ["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64", "bool"])
def test_every_scalar_type(type: str) -> None:
    for content in (0, 1, 127 if type != "bool" else True):
        header = parsed(framed(pairs=[pair(b"k", type, content), pair(b"a", f"{type}[]", [content] * 3),
                                      pair(b"none", f"{type}[]", [])]))
        assert (header.metadata["k"], header.metadata["a"], header.metadata["none"]) == (content, [content] * 3, [])
        again = [Value.of(type, content), Value.of(f"{type}[]", [content] * 3), Value.of(f"{type}[]", [])]
        assert list(header.metadata.stored().values()) == again


@pytest.mark.parametrize(("type", "content"), [("u8", 256), ("u8", -1), ("i32", 1 << 31), ("u32", "a"), ("string", 5),
                                               ("string", "\ud800"), ("f32", 1e39), ("u8[]", [1, 300]), ("array", [1]),
                                               ("array[]", [1]), ("q4", 1)])
def test_a_value_that_its_type_cannot_hold_is_refused(type: str, content: object) -> None:
    with pytest.raises(CheckpointError, match=r"a value of type|no metadata type"):
        Value.of(type, content)


# -- time and memory ---------------------------------------------------------------------------------------------------

MEBI = 1 << 20
SLOW: dict[str, Callable[[int], bytes]] = {
    "tensors": lambda size: framed([info(b"%05x" % i) for i in range(size // 46)]),
    "tensors of unknown types": lambda size: framed([info(b"%05x" % i, [], 99) for i in range(size // 30)]),
    "keys": lambda size: framed(pairs=[pair(b"%05x" % i, "u8", 0) for i in range(size // 19)]),
    "empty strings": lambda size: framed(pairs=[pair(b"k", "string[]", [b""] * (size // 8))]),
    "bytes": lambda size: framed(pairs=[text(b"k") + array("u8", size) + bytes(size)]),
    "orig_shapes": lambda size: framed([info(b"%05x" % i, []) for i in range(size // 72)],
                                       [pair(b"comfy.gguf.orig_shape.%05x" % i, "i32[]", [1]) for i in range(size // 72)]),
    "a long shape": lambda size: framed([info()], [text(b"comfy.gguf.orig_shape.a") + array("i32", size // 4) + bytes(size)]),
    "claims": lambda size: framed(pairs=[text(b"k") + array("string", size // 16) + bytes(8)]) + b"\xff" * size,
}


@pytest.mark.parametrize("case", SLOW)
def test_a_mebibyte_takes_no_square_of_its_length(case: str) -> None:
    begin = time.process_time()
    try:
        parsed(SLOW[case](MEBI))
    except CheckpointError:
        assert case == "claims"
    assert time.process_time() - begin < 30                      # a third of a second; minutes if it were a square


@pytest.mark.parametrize("case", SLOW)
def test_memory_is_a_small_multiple_of_the_header(case: str) -> None:
    data = SLOW[case](MEBI // 8)
    tracemalloc.start()
    try:
        header = parsed(data)
    except CheckpointError:
        header = None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (header is None) == (case == "claims") and peak < 40 * len(data)


@pytest.mark.parametrize("kept", [30, 200, 1 << 17])
def test_a_file_that_is_cut_while_its_header_is_read(kept: int) -> None:
    """An error, as headers are read and not mapped: touching a page of a map that is gone would end the process."""
    data = framed([info()], [LLAMA, pair(b"tokens", "string[]", [b"token"] * 50_000)], bytes(128))
    with pytest.raises(CheckpointError, match=r"x\.gguf: became shorter while it was read"):
        parsed(data[:kept], len(data))


def test_a_vocabulary_is_not_decoded_to_be_stepped_over() -> None:
    data = framed([info()], [LLAMA, pair(b"tokens", "string[]", [b"token %d" % i for i in range(50_000)]),
                             pair(b"scores", "f32[]", [1.0] * 50_000)], bytes(128))
    tracemalloc.start()
    header = parsed(data)
    assert header.metadata.stored()["tokens"].decoded(2) == ["token 0", "token 1"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.2 * len(data) + 50_000                       # its bytes, as read and as kept; strings would take twice more
    assert header.metadata["tokens"][-1] == "token 49999" and sum(header.metadata["scores"]) == 50_000


@pytest.mark.skipif(not unreserved(), reason="memory is reserved for every map")
def test_a_file_larger_than_the_memory_opens(tmp_path: Path) -> None:
    size = 1 << 40
    path = stored(tmp_path / "large.gguf", framed([info(dims=[1 << 20, 1 << 20], type=24)], data=b"\1"))
    try:
        os.truncate(path, path.stat().st_size - 1 + size)
    except OSError:
        pytest.skip("no file of 1 TiB here")
    with GgufFile(path) as file:
        assert file.tensors["a"].nbytes == size
        assert file.tensor("a")[0, :2].tolist() == [1, 0] and file.tensor("a")[-1, -1:].tolist() == [0]


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
    size = int(np.prod(shape)) // BY_NAME[type].elements * BY_NAME[type].nbytes
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


# -- what is left of changed bytes -------------------------------------------------------------------------------------

VALID = framed([info(b"t.weight", [32, 3], 8), info(b"u", [3, 2], 0, 128)], [
    LLAMA, pair(b"general.alignment", "u32", 32), pair(b"tokens", "string[]", [b"a", b"bc"]), pair(b"n", "f32[]", [1.0, 2.0]),
    pair(b"comfy.gguf.orig_shape.u", "i32[]", [6]), pair(b"split.count", "u16", 0)], bytes(160))
ODD = st.sampled_from([bytes(8), b"\xff" * 8, b"\xff" * 4, bytes(7) + b"\x80", bytes(3) + b"\x80", b"\1"])
CHANGES = st.tuples(st.integers(0, len(VALID) - 161), st.integers(0, 8), ODD | st.binary(max_size=4))


@settings(max_examples=500, deadline=None)
@given(st.lists(CHANGES, min_size=1, max_size=3), st.integers(0, 200))
def test_changed_bytes_are_parsed_or_refused(place: Path, changes: list[tuple[int, int, bytes]], cut: int) -> None:
    data = VALID
    for at, count, new in changes:
        data = data[:at] + new + data[at + count:]
    check(place, data[:len(data) - max(0, cut - 100)])


def check(path: Path, data: bytes) -> None:
    """Everything that can be asked of a file answers or raises CheckpointError."""
    try:
        file = GgufFile(stored(path, data))
    except CheckpointError:
        return
    dict(file.metadata)
    spans = []
    for name, entry in file.tensors.items():
        if entry.problem is None:
            assert len(file.data(name)) == entry.nbytes == file.rows(name).nbytes
            spans.append((entry.start, entry.start + entry.nbytes))
            assert entry.start >= 0 and (not entry.nbytes or spans[-1][1] <= len(data))
    spans = sorted(span for span in spans if span[0] < span[1])
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


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
