"""safetensors files: the library's bits both ways, nothing accepted that it refuses, and no half-written file."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import load_file, save, save_file

from qdsl.checkpoint.files import safetensors
from qdsl.checkpoint.files.safetensors import (
    CheckpointError,
    Entry,
    TensorFile,
    read_header,
    strict_json,
    torch_dtypes,
    write,
)
from tests.support.files import stored, unreserved
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file that the examples of a property write again and again."""
    return tmp_path_factory.mktemp("safetensors") / "x.safetensors"


def framed(header: object, data: bytes = b"") -> bytes:
    """A file of this header (text, or what JSON makes of it) and this data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def item(dtype: object = "U8", shape: object = (1,), offsets: object = (0, 1)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)


# Round trips

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(
    lambda name: name.isprintable() and name != "__metadata__")
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def some_tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(list(torch_dtypes().values())))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = torch.Size(shape).numel() * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    tensor = (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)
    return tensor.mT if len(shape) > 1 and draw(st.booleans()) else tensor


CONTENTS = st.dictionaries(NAMES, some_tensors(), max_size=6)


@settings(max_examples=150, deadline=None)
@given(CONTENTS, st.dictionaries(TEXTS, TEXTS, max_size=3) | st.none())
def test_the_library_reads_what_we_write(
        place: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> None:
    write(place, tensors, metadata)
    with safe_open(place, "pt") as file:
        assert (file.metadata() or {}) == (metadata or {})
        assert sorted(file.keys()) == sorted(tensors)
        assert all(same(file.get_tensor(name), tensor) for name, tensor in tensors.items())
    with TensorFile(place) as ours:
        assert ours.header.metadata == (metadata or {})
        for name, tensor in tensors.items():
            assert same(ours.tensor(name), tensor)
            assert ours.entry(name).start % tensor.dtype.itemsize == 0
            assert ours.entry(name).nbytes == tensor.numel() * tensor.dtype.itemsize


@settings(max_examples=100, deadline=None)
@given(CONTENTS, st.dictionaries(TEXTS, TEXTS, max_size=1) | st.none())
def test_we_read_what_the_library_writes_and_write_the_same_bytes(
        place: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = metadata or (metadata if tensors else None)       # the library's JSON for {} and {} has a brace too many
    expected = save(tensors, metadata)
    with TensorFile(stored(place, expected)) as file:
        assert file.header.size == len(expected)
        assert sorted(file.names()) == sorted(tensors)
        assert all(same(file.tensor(name), tensor) for name, tensor in tensors.items())
    write(place, tensors, metadata)
    assert place.read_bytes() == expected


@pytest.mark.parametrize("dtype", torch_dtypes())
def test_every_dtype_with_every_byte(place: Path, dtype: str) -> None:
    raw = torch.arange(256, dtype=torch.uint8).repeat(2)
    tensors = {"bytes": (raw % 2 if dtype == "BOOL" else raw).view(torch_dtypes()[dtype]),
               "empty": torch.empty(0, 3, dtype=torch_dtypes()[dtype]),
               "scalar": (raw[:8] % 2).view(torch_dtypes()[dtype])[0]}
    write(place, tensors)
    with TensorFile(place) as file:
        assert {file.entry(name).dtype for name in file.names()} == {dtype}
        assert [file.entry(name).shape for name in tensors] == [tensors["bytes"].shape, (0, 3), ()]
        assert all(same(file.tensor(name), tensor) for name, tensor in tensors.items())


def test_types_under_a_byte_are_listed_but_not_loaded(place: Path) -> None:
    header = {"a": item("F4", [2, 3], (0, 3)), "b": item("F6_E2M3", [4], (3, 6)), "c": item("F6_E3M2", [8], (6, 12))}
    with TensorFile(stored(place, framed(header, bytes(12)))) as file:
        assert [file.entry(name).dtype for name in file.names()] == ["F4", "F6_E2M3", "F6_E3M2"]
        with pytest.raises(CheckpointError, match=r"x\.safetensors: tensor 'a': F4 is not loaded"):
            file.tensor("a")


def test_order_is_that_of_the_bytes(place: Path) -> None:
    header = {"b": item(offsets=(1, 2)), "empty": item(shape=[0], offsets=(0, 0)), "a": item(), "__metadata__": {}}
    raw = framed(header, b"\5\6")
    with TensorFile(stored(place, raw)) as file:
        assert file.names() == ["empty", "a", "b"]
        assert file.entry("b") == Entry("U8", (1,), len(raw) - 1, len(raw))
        assert file.tensor("b").item() == 6


# Maps

def test_unaligned_tensors_are_copied_and_aligned_ones_are_not(place: Path) -> None:
    raw = json.dumps({"a": item("I32", [1], (0, 4)), "b": item(offsets=(4, 5)), "c": item("I32", [1], (5, 9))}).encode()
    raw += b" " * (-len(raw) % 8)
    stored(place, framed(raw, b"\1\0\0\0" + b"\7" + b"\2\0\0\0"))
    with TensorFile(place) as file:
        assert (file.tensor("a").item(), file.tensor("b").item(), file.tensor("c").item()) == (1, 7, 2)
        assert file.tensor("c").data_ptr() % 4 == 0
        for name in ("a", "c"):
            file.tensor(name).add_(5)
        assert (file.tensor("a").item(), file.tensor("c").item()) == (6, 2)


def test_tensors_outlive_the_file_and_never_change_it(place: Path) -> None:
    write(place, {"a": torch.arange(5)})
    before = place.read_bytes()
    with TensorFile(place) as file:
        tensor = file.tensor("a")
    place.unlink()
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    stored(place, before)
    with TensorFile(place) as file:
        file.tensor("a").add_(1)
        assert file.tensor("a").tolist() == [1, 2, 3, 4, 5]      # one map, private to this process
    assert place.read_bytes() == before
    with pytest.raises(CheckpointError, match="the file is closed"):
        file.tensor("a")


def test_bool_must_be_zero_or_one(place: Path) -> None:
    with TensorFile(stored(place, framed({"a": item("BOOL", [2], (0, 2))}, b"\1\2"))) as file, \
            pytest.raises(CheckpointError, match="neither 0 nor 1"):
        file.tensor("a")


def test_unknown_names_are_refused(place: Path) -> None:
    write(place, {"a": torch.zeros(1)})
    with TensorFile(place) as file, pytest.raises(CheckpointError, match=r"x\.safetensors: no tensor 'b\\n'"):
        file.entry("b\n")


@pytest.mark.skipif(not unreserved(), reason="memory is reserved for every map")
def test_a_file_larger_than_the_memory_opens(tmp_path: Path) -> None:
    size = 1 << 40
    path = stored(tmp_path / "large.safetensors", framed({"a": item(shape=[size], offsets=(0, size))}))
    try:
        os.truncate(path, path.stat().st_size + size)
    except OSError:
        pytest.skip("no file of 1 TiB here")
    with TensorFile(path) as file:
        assert file.tensor("a")[-3:].tolist() == [0, 0, 0]


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


# Writing

def test_the_order_of_the_arguments_does_not_matter(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3, dtype=torch.uint8), "a": torch.zeros(2), "c": torch.arange(2)}
    write(tmp_path / "1", tensors, {"format": "pt", "qdsl": "1"})
    write(tmp_path / "2", dict(reversed(tensors.items())), {"qdsl": "1", "format": "pt"})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert read_header(tmp_path / "1").metadata == {"format": "pt", "qdsl": "1"}
    assert list(read_header(tmp_path / "1").tensors) == ["c", "a", "b"]


def started(program: str, *arguments: str, seed: str = "0") -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment)


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    program = ("import sys, torch; from qdsl.checkpoint.files.safetensors import write\n"
               "keys = [f'key{i}' for i in range(8)]\n"
               "write(sys.argv[1], {k: torch.full((3,), 7.0) for k in set(keys)}, {k: k for k in set(keys)})")
    processes = [started(program, str(tmp_path / seed), seed=seed) for seed in ("1", "2")]
    assert [process.wait() for process in processes] == [0, 0]
    assert len({hashlib.sha256((tmp_path / seed).read_bytes()).hexdigest() for seed in ("1", "2")}) == 1


def test_any_strides_can_be_written(place: Path) -> None:
    base = torch.arange(24, dtype=torch.float32)
    tensors = {"turned": base.view(4, 6).T, "steps": base[::5], "repeated": base[:1].expand(3), "offset": base[7:9],
               "lone": base.as_strided((1, 1), (5, 3), 2), "learned": torch.nn.Parameter(base), "tied": base,
               "conjugate": torch.complex(base, base).conj(), "negative": torch.complex(base, base).conj().imag}
    write(place, tensors)
    expected = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
    assert all(same(load_file(place)[name], tensor) for name, tensor in expected.items())


def test_a_mapping_may_make_its_tensors_when_asked(tmp_path: Path) -> None:
    class Lazy(Mapping[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            return torch.full((int(name),), float(name))

        def __iter__(self) -> Iterator[str]:
            return iter("123")

        def __len__(self) -> int:
            return 3

    write(tmp_path / "x", Lazy())
    assert {name: tensor.tolist() for name, tensor in load_file(tmp_path / "x").items()} == {
        "1": [1.0], "2": [2.0, 2.0], "3": [3.0, 3.0, 3.0]}


class Changing(dict[str, torch.Tensor]):
    """Tensors that fail or change when their bytes are asked for: after the header and the first tensor are written."""

    def __init__(self, last: torch.Tensor | BaseException) -> None:
        super().__init__(a=torch.zeros(1000), b=torch.zeros(5))
        self.last = last

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "b" and isinstance(self.last, BaseException):
            raise self.last
        return self.last if name == "b" and isinstance(self.last, torch.Tensor) else super().__getitem__(name)


@pytest.mark.parametrize("last", [RuntimeError("stop"), KeyboardInterrupt(), torch.zeros(6), torch.ones(5).int()])
def test_an_error_in_the_middle_leaves_the_old_file_alone(tmp_path: Path, last: torch.Tensor | BaseException) -> None:
    path = stored(tmp_path / "x.safetensors", b"old")
    with pytest.raises(type(last) if isinstance(last, BaseException) else CheckpointError):
        write(path, Changing(last))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.safetensors"]


REFUSED: dict[str, tuple[dict[str, torch.Tensor], dict[str, str] | None, str]] = {
    "empty name": ({"": torch.zeros(1)}, None, "a name is 1 to 1024"),
    "control character": ({"a\n": torch.zeros(1)}, None, r"'a\\n': a name is 1 to 1024"),
    "long name": ({"n" * 1025: torch.zeros(1)}, None, "a name is 1 to 1024"),
    "metadata's name": ({"__metadata__": torch.zeros(1)}, {"a": "b"}, "belongs to the metadata"),
    "metadata's name alone": ({"__metadata__": torch.zeros(1)}, None, "belongs to the metadata"),
    "surrogate": ({"\ud800": torch.zeros(1)}, None, "half of a surrogate pair"),
    "metadata of numbers": ({}, {"a": 1}, "must map strings to strings"),  # type: ignore[dict-item]
    "dimensions": ({"a": torch.zeros([1] * 65)}, None, "65 dimensions"),
    "complex128": ({"a": torch.zeros(1, dtype=torch.complex128)}, None, r"'a': a tensor of torch\.complex128"),
    "float4": ({"a": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, None, "a tensor of torch.float4"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, None, r"torch\.sparse_coo cannot be stored"),
    "meta": ({"a": torch.empty(3, device="meta")}, None, "a meta tensor cannot be stored"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_read_is_not_written(tmp_path: Path, case: str) -> None:
    tensors, metadata, reason = REFUSED[case]
    path = stored(tmp_path / "x.safetensors", b"old")
    with pytest.raises(CheckpointError, match=rf"x\.safetensors: .*{reason}"):
        write(path, tensors, metadata)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_a_header_over_the_limit_is_not_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "HEADER_LIMIT", 100)
    with pytest.raises(CheckpointError, match="header length 120 is over the limit of 100"):
        write(place, {"a" * 60: torch.zeros(1)})


def test_reading_headers_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(3)}, tmp_path / "x.safetensors")
    program = ("import sys\n"
               "from qdsl.checkpoint.files.folder import Folder\n"
               "from qdsl.checkpoint.files.safetensors import read_header\n"
               "assert read_header(sys.argv[1]).tensors['a.weight'].dtype == 'F32'\n"
               "with Folder(sys.argv[1]) as folder: folder.layers(), folder.config\n"
               "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)")
    assert started(program, str(tmp_path / "x.safetensors")).wait() == 0
