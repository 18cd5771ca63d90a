"""safetensors files: the library's bits both ways, tensors that outlive the file, and no half-written file."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from qdsl.checkpoint.files import safetensors
from qdsl.checkpoint.files.safetensors import (
    CheckpointError,
    Entry,
    TensorFile,
    read_header,
    torch_dtypes,
    write,
)
from tests.support.files import stored, unreserved
from tests.support.paths import ROOT
from tests.support.safetensors_bytes import framed, item


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file that the examples of a property write again and again."""
    return tmp_path_factory.mktemp("safetensors") / "x.safetensors"


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


def test_types_under_a_byte_are_loaded_as_the_bytes_of_their_rows(place: Path) -> None:
    header = {"a": item("F4", [2, 4], (0, 4)), "b": item("F6_E2M3", [4], (4, 7)), "c": item("F6_E3M2", [1, 8], (7, 13)),
              "d": item("F4", [2, 3], (13, 16)), "e": item("F4", [2, 0], (16, 16))}
    with TensorFile(stored(place, framed(header, bytes(range(16))))) as file:
        assert [file.entry(name).dtype for name in file.names()] == ["F4", "F6_E2M3", "F6_E3M2", "F4", "F4"]
        assert {name: file.tensor(name).tolist() for name in "abce"} == {
            "a": [[0, 1], [2, 3]], "b": [4, 5, 6], "c": [[7, 8, 9, 10, 11, 12]], "e": [[], []]}
        with pytest.raises(CheckpointError, match=r"x\.safetensors: tensor 'd': rows of F4 \[2, 3\] end in a byte"):
            file.tensor("d")


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
