"""Products by the vendor's matmul: which miss the goals, and why."""

from __future__ import annotations

from bench import by_dense
from qdsl.analyze.gpus import GPUS


def test_products_that_miss_the_goals_are_listed_by_cause() -> None:
    """int4 is faster than dense with few rows of x; with many it is decoded, and on AMD no kernel is its own."""
    packed = next(packed for packed in by_dense.weights("int_group") if packed.storage == "planar")
    products = [one for gpu in ("h200", "mi300x") for one in by_dense.products(packed, GPUS[gpu], (1, 512))]
    assert [one.is_missed for one in products] == [False, True, False, True]
    lines = [*by_dense.missed(products)]
    assert len(lines) == 6 and lines[0] == "1 products: bytes of decode", lines
    assert lines[3].endswith("AMD has no kernels of its own: decode") and lines[4] == "  mi300x: 1 at 512 rows"
