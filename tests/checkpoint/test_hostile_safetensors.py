"""Hostile safetensors files are refused with their reason, in little time, and nothing is accepted that the library refuses."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open

from qdsl.checkpoint.files.safetensors import (
    CheckpointError,
    TensorFile,
    read_header,
    strict_json,
)
from tests.support.files import stored
from tests.support.safetensors_bytes import framed, item


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file that the examples of a property write again and again."""
    return tmp_path_factory.mktemp("safetensors") / "x.safetensors"


# Hostile files

ONE = json.dumps(item())
NAMED = "{%s:" + ONE + "}"
HOSTILE = {
    "nothing": (b"", "0 bytes"),
    "no length": (b"\2\0\0", "3 bytes; a safetensors file begins with 8 bytes"),
    "length past the end": (b"\3" + bytes(7) + b"{}", "header length 3 at byte 0, but only 2 bytes follow"),
    "length of 2^63": (bytes(7) + b"\x80" + b"{}", "over the limit of 100000000"),
    "length over the limit": ((100_000_001).to_bytes(8, "little") + b"{}", "over the limit of 100000000"),
    "no header": (framed(b""), r"begins with b'' at byte 8"),
    "leading space": (framed(b" {}"), r"begins with b' ' at byte 8"),
    "byte order mark": (framed(b"\xef\xbb\xbf{}"), r"begins with b'\\xef'"),
    "a list": (framed(b"[]"), r"begins with b'\['"),
    "trailing newline": (framed(b"{}\n"), "only spaces may follow"),
    "trailing NUL": (framed(b"{}\0"), "only spaces may follow"),
    "two values": (framed(b"{}{}"), "not JSON at character 2: Extra data"),
    "cut off": (framed(b'{"a": {}'), "not JSON at character 8"),
    "not UTF-8": (framed(b'{"\xff": 1}'), "not UTF-8 at byte 2"),
    "surrogate in UTF-8": (framed(b'{"\xed\xa0\x80": 1}'), "not UTF-8 at byte 2"),
    "half a surrogate pair": (framed(b'{"__metadata__": {"a": "\\ud800"}}'), "half of a surrogate pair"),
    "raw control character": (framed(b'{"a\x01": 1}'), "not JSON at character 3"),
    "deep": (framed(b'{"a":' + b"[" * 9 + b"]" * 9 + b"}"), "nested deeper than 3 at character 7"),
    "deep, unclosed": (framed(b'{"a":' + b"{" * 9 + b"}"), "nested deeper than 3"),
    "duplicate tensor": (framed(f'{{"a":{ONE},"a":{ONE}}}'.encode(), b"\0"), "key 'a' occurs twice"),
    "duplicate, escaped": (framed(f'{{"a":{ONE},"\\u0061":{ONE}}}'.encode(), b"\0"), "key 'a' occurs twice"),
    "duplicate dtype": (framed(b'{"a":{"dtype":"U8","dtype":"I8"}}'), "key 'dtype' occurs twice"),
    "duplicate metadata": (framed(b'{"__metadata__":{},"__metadata__":{}}'), "key '__metadata__' occurs twice"),
    "tensor is a list": (framed({"a": ["U8", [1], [0, 1]]}, b"\0"), "'a': needs exactly the keys"),
    "extra key": (framed({"a": item() | {"x": 0}}, b"\0"), "needs exactly the keys"),
    "missing key": (framed({"a": {"dtype": "U8", "shape": [1]}}, b"\0"), "needs exactly the keys"),
    "unknown dtype": (framed({"a": item("Q4")}, b"\0"), "unknown dtype 'Q4'"),
    "dtype is a list": (framed({"a": item(["U8"])}, b"\0"), "unknown dtype"),
    "negative length": (framed({"a": item(shape=[-1])}, b"\0"), "shape must be a list of integers from 0 up"),
    "minus zero": (framed(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'), "shape must be a list"),
    "true as a length": (framed({"a": item(shape=[True])}, b"\0"), "shape must be a list of integers"),
    "float as a length": (framed({"a": item(shape=[1.0])}, b"\0"), "shape must be a list of integers"),
    "text as a length": (framed({"a": item(shape=["1"])}, b"\0"), "shape must be a list of integers"),
    "shape is a number": (framed({"a": item(shape=1)}, b"\0"), "shape must be a list of integers"),
    "NaN": (framed(b'{"a":NaN}'), "NaN is not JSON"),
    "Infinity": (framed(b'{"a":{"shape":[-Infinity]}}'), "-Infinity is not JSON"),
    "infinite float": (framed(b'{"a":1e999}'), "number '1e999' out of range"),
    "long integer": (framed(b'{"a":' + b"9" * 5000 + b"}"), "a number of 5000 digits"),
    "overflow": (framed({"a": item(shape=[1 << 62, 4], offsets=(0, 0))}), "is too large"),
    "overflow beside a zero": (framed({"a": item(shape=[1 << 62, 4, 0], offsets=(0, 0))}), "is too large"),
    "too many dimensions": (framed({"a": item(shape=[1] * 65)}, b"\0"), "65 dimensions"),
    "float offset": (framed({"a": item(offsets=(0, 1.0))}, b"\0"), "data_offsets must be a list of integers"),
    "negative offset": (framed({"a": item(offsets=(-1, 0))}, b"\0"), "data_offsets must be a list of integers"),
    "three offsets": (framed({"a": item(offsets=(0, 1, 1))}, b"\0"), "must be a start and a stop"),
    "stop before start": (framed({"a": item(offsets=(1, 0))}, b"\0"), "must be a start and a stop"),
    "shape and offsets differ": (framed({"a": item("F32", [2], (0, 4))}, bytes(4)), r"F32 \[2\] takes 64 bits, .* 4 b"),
    "half a byte": (framed({"a": item("F4", [3], (0, 1))}, b"\0"), "takes 12 bits"),
    "hole": (framed({"a": item(), "b": item(offsets=(2, 3))}, bytes(3)), "'b': begins at byte .* a hole of 1 bytes"),
    "hole at the start": (framed({"a": item(offsets=(1, 2))}, bytes(2)), "'a': .* leaves a hole of 1 bytes"),
    "overlap": (framed({"a": item(shape=[2], offsets=(0, 2)), "b": item(offsets=(1, 2))}, bytes(2)), "'b': .* over"),
    "the same bytes twice": (framed({"a": item(), "b": item()}, b"\0"), "overlaps"),
    "empty tensor inside another": (framed({"a": item(shape=[2], offsets=(0, 2)), "b": item(shape=[0], offsets=(1, 1))},
                                           bytes(2)), "overlaps"),
    "bytes at the end": (framed({"a": item()}, b"\0\0"), "1 bytes follow"),
    "bytes missing": (framed({"a": item(shape=[9], offsets=(0, 9))}, bytes(4)), "5 bytes are missing"),
    "metadata with a number": (framed({"__metadata__": {"a": 1}}), "__metadata__ must map strings to strings"),
    "metadata is null": (framed({"__metadata__": None}), "__metadata__ must map strings to strings"),
    "metadata is nested": (framed({"__metadata__": {"a": {}}}), "__metadata__ must map strings to strings"),
    "empty name": (framed((NAMED % '""').encode(), b"\0"), "printable characters"),
    "long name": (framed({"n" * 1025: item()}, b"\0"), r"nnn\.\.\.': a name is 1 to 1024 printable"),
    "NUL in a name": (framed((NAMED % r'"a\u0000"').encode(), b"\0"), r"'a\\x00': a name"),
    "DEL in a name": (framed({"a\x7f": item()}, b"\0"), r"'a\\x7f': a name"),
    "C1 control in a name": (framed({"a\x9b": item()}, b"\0"), r"'a\\x9b': a name"),
    "escape code in a name": (framed({"\x1b[2J": item()}, b"\0"), r"'\\x1b\[2J': a name"),
    "bidi control in a name": (framed({"a\u202eb": item()}, b"\0"), r"'a\\u202eb': a name"),
    "line separator in a name": (framed({"a\u2028b": item()}, b"\0"), r"'a\\u2028b': a name"),
    "zero width in a name": (framed({"a\u200bb": item()}, b"\0"), r"'a\\u200bb': a name"),
    "surrogate in a name": (framed((NAMED % r'"\udc00"').encode(), b"\0"), "half of a surrogate pair"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_their_reason(place: Path, case: str) -> None:
    data, reason = HOSTILE[case]
    with pytest.raises(CheckpointError, match=rf"^.*x\.safetensors: .*{reason}") as caught:
        read_header(stored(place, data))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000
    with pytest.raises(CheckpointError):
        TensorFile(place)


def test_what_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(CheckpointError, match="not a regular file"):
            read_header(tmp_path / "pipe")


MEBI = (1 << 20) - 64
SLOW = {
    "open lists": b'{"a":' + b"[" * MEBI + b"}",
    "open objects": b'{"a":' * (MEBI // 5) + b"}",
    "lists side by side": b'{"a":[' + b"[]," * (MEBI // 3) + b"[]]}",
    "open string": b'{"' + b"a" * MEBI + b"}",
    "escaped quotes": b'{"' + b'\\"' * (MEBI // 2) + b"}",
    "backslashes": b'{"' + b"\\" * MEBI + b"}",
    "empty strings": b'{"a":[' + b'"",' * (MEBI // 3) + b'""]}',
    "digits": b'{"a":' + b"7" * MEBI + b"}",
    "exponent": b'{"a":1e' + b"7" * MEBI + b"}",
    "surrogates": b'{"__metadata__":{"a":"' + b"\\ud83d\\ude00" * (MEBI // 12) + b'"}}',
    "the same key": b"{" + b'"a":0,' * (MEBI // 6) + b'"a":0}',
    "dimensions": b'{"a":{"dtype":"U8","data_offsets":[0,1],"shape":[' + b"1," * (MEBI // 2 - 40) + b"1]}}",
    "small tensors": json.dumps({str(i): item(shape=[0], offsets=(0, 0)) for i in range(17_000)}).encode(),
    "spaces": b"{}" + b" " * MEBI,
    "spaces inside": b"{" + b" " * MEBI + b"}",
}


@pytest.mark.parametrize("case", SLOW)
def test_a_mebibyte_takes_no_square_of_its_length(place: Path, case: str) -> None:
    stored(place, framed(SLOW[case]))
    begin = time.process_time()
    if case in ("small tensors", "spaces", "spaces inside", "surrogates"):
        read_header(place)
    else:
        with pytest.raises(CheckpointError):
            read_header(place)
    assert time.process_time() - begin < 60                      # a second or two; hours if every byte were looked at twice


def test_depth_counts_brackets_outside_of_strings() -> None:
    assert strict_json(rb'{"[[\"[": ["]]{", "\\", {"a": 1}]}', "here", depth=3) == {'[["[': ["]]{", "\\", {"a": 1}]}
    with pytest.raises(CheckpointError, match=r"^here: nested deeper than 2 at character 10$"):
        strict_json(b'{"[": ["",{}]}', "here", depth=2)


# Less than the library accepts

def accepted_by_the_library(path: Path) -> bool:
    try:
        deserialize(path.read_bytes())
        with safe_open(path, "pt"):
            return True
    except SafetensorError:
        return False


def check_subset(path: Path, data: bytes) -> None:
    stored(path, data)
    try:
        header = read_header(path)
    except CheckpointError:
        return
    assert accepted_by_the_library(path)
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == sorted(header.tensors)
        for name, entry in header.tensors.items():
            view = file.get_slice(name)
            assert (view.get_dtype(), tuple(view.get_shape())) == (entry.dtype, entry.shape)


VALID = framed({"__metadata__": {"k": "v"}, "a": item("F32", [2], (0, 8)), "b": item("F4", [2], (8, 9)),
                "c": item("I16", [0, 3], (9, 9)), "d": item("BF16", [], (9, 11))}, bytes(11))
ODDITIES = st.sampled_from([b"", b" ", b"0", b"-", b"1", b'"', b"\\", b"\\u", b"{", b"}", b"[", b"]", b",", b":", b".",
                            b"e1", b"\0", b"\x1f", b"\xc3", b"\xe2\x80\xae", b"null", b"true", b"NaN", b"[]", b"{}"])
CHANGES = st.tuples(st.integers(0, len(VALID) - 20), st.integers(0, 3), ODDITIES | st.binary(max_size=2))


@settings(max_examples=600, deadline=None)
@given(st.lists(CHANGES, max_size=3))
def test_what_we_accept_of_changed_bytes_the_library_accepts(
        place: Path, changes: list[tuple[int, int, bytes]]) -> None:
    header, data = VALID[8:-11], VALID[-11:]
    for at, count, new in changes:
        header = header[:at] + new + header[at + count:]
    check_subset(place, framed(header, data))


NUMBERS = st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 8, -1, 1 << 31, 1 << 63, 1 << 64, True, 1.0])
DTYPES = st.sampled_from(["U8", "U8", "F32", "F4", "F6_E2M3", "F8_E8M0", "C64", "X", None])
ITEMS = st.fixed_dictionaries({"dtype": DTYPES, "shape": st.lists(NUMBERS, max_size=3),
                               "data_offsets": st.tuples(NUMBERS, NUMBERS)})


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), ITEMS, max_size=3),
       st.none() | st.dictionaries(st.text(max_size=2), st.text(max_size=2) | st.none(), max_size=2),
       st.binary(max_size=8))
def test_what_we_accept_of_any_header_the_library_accepts(
        place: Path, items: dict[str, object], metadata: dict[str, str | None] | None, data: bytes) -> None:
    check_subset(place, framed(items if metadata is None else items | {"__metadata__": metadata}, data))
