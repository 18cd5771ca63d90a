"""The compiled loops of searches find the numbers that numpy finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qdsl.encode import native, search, vectors
from qdsl.generated import iq1_s, iq2_xxs, q2_0, q4_0, q4_k, q5_0, q8_0, q8_1, tq1_0
from qdsl.host import library
from qdsl.runtime.weight.packed import FormatError


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


@pytest.mark.parametrize("module", [iq2_xxs, iq1_s, q4_k])
def test_quantize_makes_the_same_bytes(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)) / 50
    weight[1, 256:] = 0
    packed = module.quantize(weight)                             # type: ignore[attr-defined]
    library.choose("never")
    assert torch.equal(packed.tensors["blocks"], module.quantize(weight).tensors["blocks"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("module", [q2_0, q4_0, q5_0, q8_0, q8_1, tq1_0])
def test_blocks_with_one_scale_have_the_same_bytes(module: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties of magnitudes and of codes, zeros of both signs, numbers below the smallest scale, and scales without a reciprocal."""
    weight = torch.randn(12, 1024, generator=torch.Generator().manual_seed(0))
    ties = torch.randint(-127, 128, (2, 1024), generator=torch.Generator().manual_seed(1)) / 2
    weight[0], weight[1], weight[2], weight[3] = 0, -0.0, ties[0], ties[1].round() / 8
    weight[4, ::2], weight[4, 1::2] = 3, -3
    weight[5, ::2], weight[5, 1::2] = -3, 3
    weight[6:10] *= torch.tensor([1e-38, 2e-39, 1e-42, 1e4])[:, None]
    calls, scaled_codes = [], native.scaled_codes
    monkeypatch.setattr(native, "scaled_codes", lambda *arguments: calls.append(scaled_codes(*arguments)) or calls[-1])
    packed = module.quantize(weight.to(dtype))
    library.choose("never")
    plain = module.quantize(weight.to(dtype))
    assert calls[0] is not None and calls[-1] is None
    assert all(torch.equal(packed.tensors[name], tensor) for name, tensor in plain.tensors.items())
    library.choose("always")
    weight[3, 70] = 1e38
    for setting in ("always", "never"):
        library.choose(setting)
        with pytest.raises(FormatError, match=r"block \[3, \d+\] does not fit f16"):
            module.quantize(weight)


def blocks(kind: str, elements: int, count: int) -> np.ndarray:
    """Blocks [elements, count] of one kind of numbers: ordinary ones, ties, one sign, zeros, and what leaves float32's range."""
    generator = np.random.default_rng(count)
    x = generator.standard_normal((elements, count)).astype(np.float32)
    x[:, ::5] = 0
    if kind == "ties":
        return np.round(x) / 2
    if kind == "one sign":
        return -np.abs(x)
    factors = {"tiny": 1e-30, "subnormal": 1e-42, "huge": 1e30}
    return x * np.float32(factors.get(kind, 1))


@pytest.mark.parametrize("kind", ["plain", "ties", "one sign", "tiny", "subnormal", "huge"])
def test_searches_find_the_bits_of_numpy(kind: str) -> None:
    """Lanes that are filled, and some that are not."""
    with np.errstate(all="ignore"):
        for elements, count in ((32, 40), (16, 3), (64, 16)):
            x = blocks(kind, elements, count)
            for magnitudes in (False, True):
                weights = search.magnitudes(x, magnitudes)
                tops = [np.float32(14.1 + i / 10) for i in range(15)]
                fits = native.fit_counts(x, weights, 15, tops, magnitudes)
                wanted = search._fit_counts(x, weights, 15, tops, magnitudes)
                assert fits is not None and len(fits) == len(wanted)
                assert all((own.view(np.int32) == other.view(np.int32)).all() for own, other in zip(fits, wanted, strict=True))
            ends = [np.float32(end) for end in (-32, -32.9, -31.5, -31.1)]
            fits = native.fit_signed(x, x * x, -32, 31, ends)
            wanted = search._fit_signed(x, x * x, -32, 31, ends)
            assert fits is not None and len(fits) == len(wanted)
            assert all((own.view(np.int32) == other.view(np.int32)).all() for own, other in zip(fits, wanted, strict=True))


def test_searches_that_numpy_has_to_do() -> None:
    x = np.ones((65, 2), np.float32)
    assert native.fit_counts(x, x, 15, [np.float32(15)], False) is None
    assert native.fit_signed(x[:64], x[:64], -32, 31, [np.float32(-32)]) is not None
    library.choose("never")
    assert native.fit_signed(x[:64], x[:64], -32, 31, [np.float32(-32)]) is None


def test_the_nearest_vectors_are_those_of_torch() -> None:
    """Of entries that are as near, the first."""
    drawn = torch.Generator().manual_seed(7)
    table = torch.randint(-3, 4, (64, 3), generator=drawn).double()
    x = torch.randint(-6, 7, (500, 3), generator=drawn).double() / 2
    count = torch.rand(500, 3, generator=drawn, dtype=torch.float64)
    codes = native.nearest_vectors(x, count, table)
    library.choose("never")
    assert codes is not None and torch.equal(vectors.nearest_vectors(x, count, table), codes)
