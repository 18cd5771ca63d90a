"""Kernel csr, which adds the product with sparse outliers: against float64, in Triton's interpreter and from its PTX."""

from __future__ import annotations

import pytest
import torch

from qdsl.runtime.gpu.branch_launches import csr_call
from qdsl.runtime.torch import branch_products
from tests.formats.test_branches import branched
from tests.kernels.execute_csr import ROWS, entries, operands, wanted
from tests.kernels.test_execute_kernels import lines
from tests.support.interpreter import INTERPRETED, guarded


@pytest.mark.skipif(not INTERPRETED, reason="from its PTX below")
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_are_as_exact_as_float32_allows(m: int, dtype: torch.dtype) -> None:
    lists, (x, out) = entries(dtype=dtype), operands(m, dtype)
    sums = torch.full_like(out, torch.nan)
    call = csr_call(out, sums, x, *lists)
    with guarded(*call.tensors):
        call.run()
    exact, allowed = wanted(x, out, *lists)
    assert bool(((sums.double() - exact).abs() <= allowed).all())


def test_the_compiled_kernel_is_right_and_the_checkers_find_nothing() -> None:
    executed = lines("tests.kernels.execute_csr")
    assert len(executed) == 4
    assert [line for line in executed if not line["error"] <= 1 or line["findings"]] == []


@pytest.mark.skipif(not INTERPRETED, reason="kernels run on GPUs alone")
@pytest.mark.parametrize("mode", ["", "batch_invariant"])
def test_products_of_a_weight_take_the_kernel(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; the sum is that of the CPU, up to the order of float32 sums."""
    packed = branched("outliers")
    generator = torch.Generator().manual_seed(0)
    x, out = torch.randn(3, 256, generator=generator), torch.randn(3, 64, generator=generator)
    on_cpu = branch_products.add_branches(out, x, packed, False, mode)
    launched: list[torch.Size] = []
    monkeypatch.setattr(branch_products, "has_csr", lambda x: not launched.append(x.shape))
    assert torch.allclose(branch_products.add_branches(out, x, packed, False, mode), on_cpu, rtol=1e-5, atol=1e-4)
    assert launched == ([torch.Size((1, 256))] * 3 if mode else [torch.Size((3, 256))])
