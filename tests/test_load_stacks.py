"""Experts that a checkpoint has one by one, in a model that holds them in one parameter: loaded, run, and saved as they were."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qdsl
from qdsl.runtime import PackedWeight
from tests.support import formats
from tests.support.small_models import files, folder, own_config
from tests.test_load_formats import CASES, names_in_files

E = 2                                                            # experts


def moe(experts: int = E, parent: str = "experts", transposed: bool = False, dtype: torch.dtype = torch.float32,
        **shapes: tuple[int, int]) -> nn.Module:
    """Parameters [E, N, K], or [E, K, N], on meta; shapes: (N, K) by name."""
    parameters = {name: torch.empty(experts, *(shape[::-1] if transposed else shape), device="meta", dtype=dtype)
                  for name, shape in shapes.items()}
    return nn.ModuleDict({parent: nn.ParameterDict(parameters)})


def one_by_one(weights: dict[str, PackedWeight]) -> dict[str, Tensor]:
    """The tensors of layers under the names of files."""
    return {full: packed.tensors[own] for name, packed in weights.items() for own, full in names_in_files(name, packed).items()}


def rows_of(weights: list[PackedWeight], experts: int = E) -> Tensor:
    """The numbers [E, N, K] of weights whose rows follow one another."""
    dense = torch.cat([packed.format.dequantize(packed, torch.float32) for packed in weights])
    return dense.view(experts, -1, dense.shape[1])


def check_stack(stack: qdsl.Experts, dense: Tensor) -> None:
    """Everything that a stack gives: shapes, numbers, packed weights of an expert, and products."""
    assert isinstance(stack, qdsl.Experts) and stack.shape == dense.shape
    numbers = dense.transpose(1, 2) if stack.transposed else dense                             # [E, N, K]
    assert formats.same_bits(stack.dequantize(), dense) and formats.same_bits(stack[1], dense[1])
    assert formats.same_bits(rows_of(stack.weights(-1), 1)[0], numbers[-1])
    x, bias = torch.randn(5, numbers.shape[2]), torch.randn(numbers.shape[:2])
    offsets = [0, *[2] * (len(dense) - 1), 5]
    wanted = torch.cat([nn.functional.linear(x[start:stop], numbers[expert], bias[expert])
                        for expert, (start, stop) in enumerate(pairwise(offsets))])
    torch.testing.assert_close(stack(x, offsets, bias), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()), equal_nan=True)
    assert stack(x[:0], [0] * (len(dense) + 1)).shape == (0, numbers.shape[1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_storage_fills_a_stack(case: formats.Case, tmp_path: Path) -> None:
    """Two layers an expert, joined or apart: the same numbers, and the same files again."""
    n, k = next(formats.shapes(case, (64, 128, 80), (256, 512, 64)))
    weights = {f"experts.{expert}.{piece}": formats.random_packed(case, (n, k), seed=2 * expert + seed)
               for expert in range(E) for seed, piece in enumerate(("gate_proj", "up_proj"))}
    first = next(iter(weights.values()))
    source = folder(tmp_path / "in", one_by_one(weights), own_config(first))
    model = moe(gate_up_proj=(2 * n, k))
    report = qdsl.load_weights_(model, source)
    stack = model.experts.gate_up_proj
    assert report.packed == {"experts.gate_up_proj": f"{first.format.name}.{first.storage}"} and report.unused == []
    assert len(stack.parts) in (1, 2 * E) and not (first.layout.streams and len(stack.parts) == 1)
    check_stack(stack, rows_of(list(weights.values())))
    saved = qdsl.save_model(model, tmp_path / "out")
    if saved.exact:
        assert files(tmp_path / "out") == files(source)
    else:                                                        # a producer's small tensors were missing
        again = moe(gate_up_proj=(2 * n, k))
        qdsl.load_weights_(again, tmp_path / "out")
        assert formats.same_bits(again.experts.gate_up_proj.dequantize(), stack.dequantize())
        assert qdsl.save_model(again, tmp_path / "twice").exact
