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
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    rows, left_out = ([row for row in cells if len(row) == width and row[0] not in ("layout", "---")] for width in (4, 2))
    named = {spec.strip("`") for _, spec, _, _ in rows} - {""}
    assert {path.stem for path in SPECS} <= named <= {path.stem for path in (*SPECS, *SHIPPED)}
    assert all((answer == "yes") == bool(spec) and (answer == "yes" or not package) for _, spec, answer, package in rows)
    assert left_out and all(all(row) for row in left_out)
    assert len({row[0] for row in rows + left_out}) == len(rows + left_out)
    expressible, exact = (sum(bool(row[place]) for row in rows) for place in (1, 3))
    shown = re.search(r"counts (\d+) of.*Expressible: (\d+) of (\d+). Exact: (\d+) of (\d+).", page, re.DOTALL)
    expected = [len(rows), expressible, len(rows), exact, len(rows)]
    assert shown is not None and [int(number) for number in shown.groups()] == expected
