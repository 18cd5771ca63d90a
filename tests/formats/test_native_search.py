"""The compiled loop of searches in grids finds the rows that numpy finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from qdsl.encode import native
from qdsl.generated import iq1_s, iq2_xxs
from qdsl.host import library


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path))
    library.choose("always")
    yield
    library.choose("never")


@pytest.mark.parametrize("columns", [16, 48, 512])
def test_rows_of_equal_gain_are_the_first(columns: int) -> None:
    """Small integers, so that most maxima are reached several times, and zeros of both signs."""
    generator = np.random.default_rng(columns)
    linear, square = (generator.integers(-3, 3, (200, columns)).astype(np.float32) for _ in range(2))
    linear[::7] = -0.0
    square[::7] = 0
    factor = generator.choice(np.array([0, 0.5, 1, -2], np.float32), 200)
    rows = native.best_rows(linear, square, factor[:, None])
    wanted = linear - square * factor[:, None]
    assert rows is not None
    assert (rows[0] == wanted.argmax(axis=1)).all()
    assert (rows[1].view(np.int32) == wanted.max(axis=1, initial=-np.inf).astype(np.float32).view(np.int32))[rows[1] != 0].all()


def test_what_numpy_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, factor = np.ones((3, 32), np.float32), np.ones((3, 1), np.float32)
    assert native.best_rows(linear[:, :24].copy(), linear[:, :24].copy(), factor) is None
    assert native.best_rows(linear, linear, np.array([[0], [np.nan], [1]], np.float32)) is None
    assert native.best_rows(linear, linear, factor) is not None
    library.choose("never")
    assert native.best_rows(linear, linear, factor) is None


@pytest.mark.parametrize("module", [iq2_xxs, iq1_s])
def test_quantize_makes_the_same_bytes(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)) / 50
    weight[1, 256:] = 0
    packed = module.quantize(weight)                             # type: ignore[attr-defined]
    library.choose("never")
    assert torch.equal(packed.tensors["blocks"], module.quantize(weight).tensors["blocks"])  # type: ignore[attr-defined]
