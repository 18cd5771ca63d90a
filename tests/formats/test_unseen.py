"""Layouts of other packages that do not ship: a spec of each, and bytes that decode to the package's own values.

tests/unseen/README.md says whose bytes they are.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import qdsl
from qdsl.runtime import PackedWeight
from tests.support.formats import ROOT, SHIPPED, same_bits

SPECS = sorted((ROOT / "tests" / "unseen").glob("*.yaml"))
MOST_LINES = 35


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_layout_from_its_spec_alone(path: Path) -> None:
    assert sum(bool(line.strip()) for line in path.read_text().splitlines()) <= MOST_LINES
    module = qdsl.load(path)
    with np.load(path.with_suffix(".npz")) as file:
        tensors = {key: torch.from_numpy(file[key].copy()) for key in file.files}
    expected = tensors.pop("expected")
    packed: PackedWeight = module.wrap(tensors, shape=tuple(expected.shape))
    assert same_bits(module.dequantize(packed, torch.float32), expected)
    again = module.pack(module.unpack(packed), storage=packed.storage, **packed.params).tensors
    assert all(same_bits(again[name].flatten(), tensor.flatten()) for name, tensor in packed.tensors.items())


def test_the_page_counts_what_is_there() -> None:
    """Every spec has its row, and the figures are those of the rows."""
    page = (ROOT / "docs" / "language" / "layouts.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")][2:]
    named = {cells[1].strip("`") for cells in rows} - {""}
    assert {path.stem for path in SPECS} <= named <= {path.stem for path in (*SPECS, *SHIPPED)}
    assert all((cells[2] == "yes") == bool(cells[1]) and (cells[2] == "yes" or not cells[3]) for cells in rows)
    counts = [sum(cells[2] == "yes" for cells in rows), sum(bool(cells[3]) for cells in rows)]
    shown = re.search(r"Expressible: (\d+) of (\d+). Exact: (\d+) of (\d+).", page)
    assert shown is not None and [int(number) for number in shown.groups()] == [counts[0], len(rows), counts[1], len(rows)]
