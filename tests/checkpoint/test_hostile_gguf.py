"""Hostile GGUF files are refused with their reason, in little time and memory, and what is odd and harms nobody is noted."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdsl.checkpoint.detect.gguf_weights import packed_weight
from qdsl.checkpoint.files import gguf_metadata
from qdsl.checkpoint.files.gguf import GgufFile, Header, parse
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.safetensors import CheckpointError
from tests.support.files import stored, unreserved
from tests.support.ggufs import array, framed, info, pair, text


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file that the examples of a property write again and again."""
    return tmp_path_factory.mktemp("gguf") / "x.gguf"


def parsed(data: bytes, size: int | None = None) -> Header:
    return parse(BytesIO(data), len(data) if size is None else size, Path("x.gguf"))


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
