"""What stands for all: the formats over which dear tests run."""

from __future__ import annotations

from tests.support.covering import ALL, covering, kernels, lines_of
from tests.support.formats import cases


def one(a: int, b: int) -> int:
    return a + 2 * b


def renamed(x: int, y: int) -> int:
    return x + 16 * y


def other(a: int, b: int) -> int:
    return a - 2 * b


def test_names_and_numbers_do_not_make_a_line_another() -> None:
    assert list(lines_of(one)) == list(lines_of(renamed)) != list(lines_of(other))


def test_no_line_is_left_out() -> None:
    for kinds in (("dequantize", "matvec"), ("gemv", "skinny", "tile_gemm")):
        lines = {case: {line for kernel in kernels(case, *kinds) for line in lines_of(kernel)} for case in cases()}
        chosen = covering(cases(), lambda case, kinds=kinds: kernels(case, *kinds))  # type: ignore[misc]
        assert set().union(*(lines[case] for case in chosen)) == set().union(*lines.values())
        assert len(set(chosen)) == len(chosen) and (ALL or len(chosen) < 0.75 * len(cases()))
