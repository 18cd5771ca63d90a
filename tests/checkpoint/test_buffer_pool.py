"""Memory that tensors of a job are read into one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qdsl.checkpoint.files import buffer_pool
from qdsl.checkpoint.files.buffer_pool import BufferPool
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write


def test_tensors_are_read_into_memory_that_nothing_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(buffer_pool, "LEAST", 64)
    tensors = {name: torch.randn(8, columns) for name, columns in (("a", 32), ("b", 32), ("c", 16), ("d", 64), ("e", 1))}
    write(tmp_path / "model.safetensors", tensors)
    with Folder(tmp_path, copies=True, buffers=BufferPool()) as folder:
        first = folder.tensor("a")
        place = first.data_ptr()
        part = first[2:4].view(torch.int32)                      # holds the memory as well
        del first
        second = folder.tensor("b")
        assert torch.equal(part, tensors["a"][2:4].view(torch.int32)) and torch.equal(second, tensors["b"])
        assert abs(second.data_ptr() - place) >= 8 * 32 * 4
        del part
        third = folder.tensor("c")                               # shorter
        assert third.data_ptr() == place and place % 64 == 0
        assert torch.equal(third, tensors["c"]) and torch.equal(second, tensors["b"])
        del second
        longer = folder.tensor("d")                              # for which no block is long enough
        assert torch.equal(longer, tensors["d"]) and torch.equal(third, tensors["c"])
        assert folder.file("d")._buffers is folder.file("a")._buffers and len(folder.file("d")._buffers._blocks) == 2
        assert torch.equal(folder.tensor("e"), tensors["e"]) and len(folder.file("d")._buffers._blocks) == 2
    assert torch.equal(longer, tensors["d"]) and torch.equal(third, tensors["c"])
