"""Importance matrices in both forms: what they say of a tensor, and files that lie."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.jobs.gguf.imatrix import read
from qdsl.jobs.gguf.mixes import Tensor

UP = Tensor("blk.0.ffn_up.weight", (3, 4), "F16")
EXPERTS = Tensor("blk.0.ffn_up_exps.weight", (2, 3, 4), "F16")


def older(entries: dict[str, tuple[int, list[float]]], tail: bytes = b"") -> bytes:
    """The older form: what llama-imatrix wrote as .dat."""
    parts = [struct.pack("<i", len(entries))]
    for name, (calls, values) in entries.items():
        text = name.encode()
        parts.append(struct.pack("<i", len(text)) + text + struct.pack(f"<ii{len(values)}f", calls, len(values), *values))
    return b"".join([*parts, tail])


def newer(path: Path, tensors: dict[str, np.ndarray], about: bool = True) -> Path:
    """The GGUF form."""
    writer = gguf.GGUFWriter(path, "")
    if about:
        writer.add_array("imatrix.datasets", ["wiki.txt", "code.txt"])
        writer.add_uint32("imatrix.chunk_count", 7)
        writer.add_uint32("imatrix.chunk_size", 512)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def file(folder: Path, data: bytes) -> Path:
    path = folder / "imatrix.dat"
    path.write_bytes(data)
    return path


WHOLE = older({UP.name: (4, [4, 8, 12, 2]), EXPERTS.name: (2, [2.0] * 4 + [6.0] * 4)}, struct.pack("<ii4s", 9, 4, b"wiki"))


def test_the_older_form(tmp_path: Path) -> None:
    matrix = read(file(tmp_path, WHOLE))
    assert (matrix.datasets, matrix.chunks, list(matrix.entries)) == (("wiki",), 9, [UP.name, EXPERTS.name])
    up, experts = matrix.values(UP), matrix.values(EXPERTS)
    assert up is not None and up.tolist() == [[1, 2, 3, 0.5]] and up.dtype == torch.float32
    assert experts is not None and experts.tolist() == [[1.0] * 4, [3.0] * 4]
    assert matrix.values(Tensor("output.weight", (3, 4), "F16")) is None


def test_the_older_form_without_its_end_or_calls(tmp_path: Path) -> None:
    matrix = read(file(tmp_path, older({UP.name: (0, [1, 2, 3, 4])})))
    values = matrix.values(UP)
    assert matrix.datasets == () and values is not None and values.tolist() == [[1, 2, 3, 4]]


def test_the_form_of_gguf(tmp_path: Path) -> None:
    """Each expert has its own count; one that was never asked has columns that matter alike."""
    sums = np.array([[2, 4, 6, 8], [5, 5, 5, 5]], np.float32)
    matrix = read(newer(tmp_path / "i.gguf", {
        f"{EXPERTS.name}.in_sum2": sums, f"{EXPERTS.name}.counts": np.array([[2], [0]], np.float32),
        f"{UP.name}.in_sum2": sums[:1], f"{UP.name}.counts": np.array([[3]], np.float32)}))
    experts, up = matrix.values(EXPERTS), matrix.values(UP)
    assert experts is not None and experts.tolist() == [[1, 2, 3, 4], [1, 1, 1, 1]]
    assert up is not None and up.equal(torch.tensor([[2.0, 4, 6, 8]]) / 3)
    assert matrix.datasets == ("wiki.txt", "code.txt") and matrix.chunks == 7


def test_values_that_do_not_fit_name_their_tensor(tmp_path: Path) -> None:
    entries = {UP.name: (1, [1.0, 2, 3]), EXPERTS.name: (1, [1.0] * 4), "token_embd.weight": (1, [1.0] * 9)}
    matrix = read(file(tmp_path, older(entries)))
    with pytest.raises(CheckpointError, match=r"importance of 'blk.0.ffn_up.weight': 3 values, the tensor needs 4$"):
        matrix.values(UP)
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up_exps.weight': 4 values, the tensor needs 4 for each of 2 experts"):
        matrix.values(EXPERTS)
    assert matrix.values(Tensor("token_embd.weight", (9, 4), "F16")) is None


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_values_that_no_squares_add_up_to(tmp_path: Path, value: float) -> None:
    matrix = read(file(tmp_path, older({UP.name: (1, [1, value, 3, 4])})))
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_up\.weight': a value that is negative or not finite"):
        matrix.values(UP)


F32 = np.ones((1, 4), np.float32)


@pytest.mark.parametrize(("tensors", "message"), [
    ({"a.in_sum2": F32}, "no tensor 'a.counts'"),
    ({"a.counts": F32}, "'a.counts' without 'a.in_sum2'"),
    ({"a.weight": F32}, "no tensor ends in .in_sum2; this is no importance matrix"),
    ({"a.in_sum2": F32.astype(np.float16), "a.counts": F32[:, :1]}, "'a.in_sum2': importances are F32, not F16"),
])
def test_gguf_files_that_are_none(tmp_path: Path, tensors: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(newer(tmp_path / "i.gguf", tensors, about=False))


def test_counts_that_do_not_divide_the_values(tmp_path: Path) -> None:
    matrix = read(newer(tmp_path / "i.gguf", {f"{UP.name}.in_sum2": F32, f"{UP.name}.counts": np.ones((3, 1), np.float32)}))
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_up\.weight': 3 counts for 4 values"):
        matrix.values(UP)


@pytest.mark.parametrize(("data", "message"), [
    (b"", "0 bytes are no importance matrix"),
    (struct.pack("<i", 0), "the number of entries of an importance matrix is 0"),
    (struct.pack("<i", -1) + bytes(40), "the number of entries of an importance matrix is -1"),
    (struct.pack("<i", 1 << 30) + bytes(40), "byte 0: the number of entries of an importance matrix is 1073741824"),
    (struct.pack("<ii", 1, 1 << 30) + bytes(40), "byte 4: the length of a name is 1073741824"),
    (struct.pack("<ii", 1, 30) + b"a" * 17, "a text take 30 bytes, but 17 follow"),
    (struct.pack("<ii1sii", 1, 1, b"a", 1, 1 << 30) + bytes(8), "1073741824 values of 'a' take 4294967296 bytes, but 8 follow"),
    (struct.pack("<ii1sii", 1, 1, b"\xff", 1, 1) + bytes(4), "byte 8: a text that is not UTF-8"),
    (struct.pack("<ii1sii", 1, 1, b"a", -5, 1) + bytes(4), "the number of calls is -5"),
    (WHOLE + b"x", "1 bytes follow the last entry"),
    (older({"a": (1, [1.0])})[:4].replace(b"\1", b"\2") + 2 * older({"a": (1, [1.0])})[4:], "'a' occurs twice"),
])
def test_older_files_that_lie(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(file(tmp_path, data))


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    """Wherever that was; but for its end, which may be missing."""
    whole = len(WHOLE) - 12
    for length in range(len(WHOLE)):
        path = file(tmp_path, WHOLE[:length])
        if length == whole:
            assert read(path).datasets == ()
        else:
            with pytest.raises(CheckpointError, match=r"imatrix\.dat"):
                read(path)


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, len(WHOLE) - 1), byte=st.integers(0, 255), more=st.binary(max_size=8))
def test_wrong_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, place: int, byte: int, more: bytes) -> None:
    data = bytearray(WHOLE)
    data[place] = byte
    try:
        matrix = read(file(tmp_path_factory.mktemp("bytes"), bytes(data) + more))
        for tensor in (UP, EXPERTS):
            matrix.values(tensor)
    except CheckpointError as error:
        assert len(str(error)) < 500
