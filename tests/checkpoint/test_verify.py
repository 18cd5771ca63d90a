"""Two checkpoints side by side: every kind of difference is found, and its place is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from qdsl.checkpoint.files.safetensors import read_header, torch_dtypes, write
from qdsl.checkpoint.report import verify as module
from qdsl.checkpoint.report.verify import differences
from qdsl.cli import app
from tests.support.paths import ROOT


def verify(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the files of a property's examples."""
    return tmp_path_factory.mktemp("verify")


def tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(24, dtype=torch.float32).view(2, 3, 4), "n": torch.ones(3, dtype=torch.bfloat16),
            "none": torch.empty(0, 4), "scalar": torch.tensor(2.5)}


def test_equal_checkpoints_however_they_are_cut(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts"
    parts.mkdir()
    write(whole, tensors(), {"format": "pt"})
    for name, tensor in tensors().items():
        write(parts / f"{name}.safetensors", {name: tensor})
    assert differences(whole, parts) == differences(parts, whole) == []
    result = verify(whole, parts)
    assert (result.exit_code, result.stdout) == (0, "equal\n")
    assert json.loads(verify(whole, parts, "--json").stdout) == {"schema": 1, "equal": True, "differences": []}


def test_what_differs_is_said(tmp_path: Path) -> None:
    """Tensors that are missing on either side, dtypes, shapes, and elements: bits that mean the same number too."""
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write(a, {**tensors(), "only_a": torch.ones(1), "h": torch.ones(2), "z": torch.tensor([1.0, 0.0])})
    other = tensors()
    other["w"][1, 0, 2], other["w"][1, 2, 3] = -1, torch.nan
    write(b, {**other, "only_b": torch.ones(1), "h": torch.ones(2).half(), "none": torch.empty(4, 0),
              "z": torch.tensor([1.0, -0.0])})
    result = verify(a, b)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "h: dtype F32 and F16", "none: shape [0, 4] and [4, 0]", "only_a: only in A: F32 [1]",
        "w: 2 of 24 elements differ, the first at [1, 0, 2]: 14.0 (0x41600000) and -1.0 (0xbf800000)",
        "z: 1 of 2 elements differ, the first at [1]: 0.0 (0x00000000) and -0.0 (0x80000000)",
        "only_b: only in B: F32 [1]",
        "differences: 6; --decoded compares the weights that layers stand for, whatever their layouts"]
    data = json.loads(verify(a, b, "--json").stdout)
    assert not data["equal"] and data["differences"][3] == {
        "tensor": "w", "kind": "values", "a": "14.0 (0x41600000)", "b": "-1.0 (0xbf800000)", "differing": 2, "elements": 24,
        "index": [1, 0, 2]}


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    for name, value in (("a", 0), ("b", 1)):
        write(tmp_path / f"{name}.safetensors", {f"{i:02d}\n"[:2]: torch.tensor([value]) for i in range(60)})
    lines = verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors").stdout.splitlines()
    assert len(lines) == 52 and lines[-2:] == ["... and 10 more", "differences: 60"]


@settings(deadline=None)
@given(st.data())
def test_the_first_of_all_changed_elements_is_found(place: Path, data: st.DataObject) -> None:
    """Over dtypes, shapes, and pieces and reads that end anywhere."""
    dtype = data.draw(st.sampled_from([candidate for candidate in torch_dtypes().values() if candidate is not torch.bool]))
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3))
    count = torch.Size(shape).numel()
    raw = torch.zeros(count, dtype.itemsize, dtype=torch.uint8)
    changed = data.draw(st.sets(st.integers(0, count - 1)))
    other = raw.clone()
    for index in changed:
        other[index, data.draw(st.integers(0, dtype.itemsize - 1))] = 1
    for name, bits in (("a", raw), ("b", other)):
        write(place / f"{name}.safetensors", {"x": bits.view(dtype).view(shape), "y": torch.zeros(3)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 16 * data.draw(st.integers(1, 4)))
        patch.setattr(module, "READ", 16 * data.draw(st.integers(1, 3)))
        reports = differences(place / "a.safetensors", place / "b.safetensors")
    assert len(reports) == bool(changed)
    if changed:
        values = reports[0].values
        assert values is not None and (values.count, values.of) == (len(changed), count)
        assert values.index == tuple(int(i) for i in torch.unravel_index(torch.tensor(min(changed)), shape))


def test_dtypes_under_a_byte_are_compared_by_bytes(tmp_path: Path) -> None:
    for name, last in (("a", 1), ("b", 2)):
        write(tmp_path / f"{name}.safetensors", {"x": torch.tensor([7, 7, last], dtype=torch.uint8)})
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(path.read_bytes().replace(b'"U8","shape":[3]', b'"F4","shape":[6]'))
    assert read_header(path).tensors["x"].dtype == "F4"
    [difference] = differences(tmp_path / "a.safetensors", path)
    assert str(difference) == "1 of 3 bytes differ, the first at [2]: 0x01 and 0x02"


def test_processes_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    x = torch.zeros(5000, dtype=torch.int16)
    write(a, {"x": x, "y": x})
    x[4321:4400] = 1
    write(b, {"x": x, "y": x * 0})
    monkeypatch.setattr(module, "PIECE", 1000)
    assert differences(a, b, jobs=2) == differences(a, b)
    assert [str(difference) for difference in differences(a, b)] == [
        "79 of 5000 elements differ, the first at [4321]: 0 (0x0000) and 1 (0x0001)"]


def test_equal_files_are_compared_without_torch(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", tensors())
    code = "import sys; from qdsl.cli import app\ntry: app(['verify', *sys.argv[1:]])\n" \
           "except SystemExit as end: assert end.code == 0\nassert not {'torch', 'numpy'} & sys.modules.keys()"
    path = str(tmp_path / "a.safetensors")
    subprocess.run([sys.executable, "-c", code, path, path], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_what_cannot_be_read_is_a_message(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", tensors())
    (tmp_path / "b.safetensors").write_bytes(b"\0")
    for other, message in (("b.safetensors", "1 bytes"), ("c.safetensors", "No such file")):
        result = verify(tmp_path / "a.safetensors", tmp_path / other)
        assert result.exit_code == 1 and message in result.stderr
