"""Plans of products on a GPU: all legal kernels for a packed weight, and the one with the least modelled cost.

All dispatch on GPUs happens here.  A Candidate is a kernel of a family (gpu/families) in a launch configuration, or 'decode',
which dequantizes and calls the vendor's matmul.  runtime/gpu/costs.py models their seconds.  A candidate that `qdsl.tune` timed
as the fastest on this device takes precedence.

runtime/weight/products.py keeps choices and prepared launches for all weights of one description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qdsl.runtime.gpu import configure, costs
from qdsl.runtime.gpu.devices import Gpu
from qdsl.runtime.gpu.families import ANY_GPU, ANY_PRODUCT, BY_EXPERTS, FAMILIES, MATRIX_UNIT
from qdsl.runtime.gpu.families.family import Product as Product
from qdsl.runtime.weight import stream_kernels
from qdsl.runtime.weight.arrays import cdiv
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.products import forget_products as forget_plans
from qdsl.runtime.weight.target import Candidate, plan_of

ROWS = 4096                                                      # rows of x: up to here every number of rows has its own choice


@dataclass(frozen=True, slots=True)
class CandidateCost:
    """A legal candidate and its modelled seconds."""

    candidate: Candidate
    seconds: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate for a product.  is_tuned: `qdsl.tune` timed it as the fastest.

    options: all legal candidates, the cheapest first.
    """

    candidate: Candidate
    options: tuple[CandidateCost, ...]
    is_tuned: bool = False


def forget() -> None:
    """Forget all choices and prepared launches, so that the next product reads the files of tuned candidates again."""
    configure.forget()
    forget_plans()


def choice(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device, is_aligned: bool = True) -> Choice:
    """The choice for x [m, K] @ w.T.  dtype: of x.  is_aligned: x and the weight are aligned for loads of 16 bytes."""
    plan, rows, gpu = plan_of(packed), rows_class(m), configure.gpu(device)
    key = (rows, dtype, configure.target(device), gpu, device, is_aligned)
    chosen = plan.choices.get(key)
    if chosen is None:
        chosen = plan.choices[key] = _choice(packed, rows, dtype, device, gpu, is_aligned)
    return chosen


def rows_class(m: int) -> int:
    """The number of rows whose choice serves m: m up to ROWS, above it one per number of 128-row tiles, whole or partial."""
    return m if m <= ROWS or m % 128 == 0 else cdiv(m, 128) * 128 - 1


def best(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device, is_aligned: bool = True) -> Candidate:
    """The candidate that runs x [m, K] @ w.T."""
    return choice(packed, m, dtype, device, is_aligned).candidate


def fused_candidate(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device, is_aligned: bool = True) -> Candidate:
    """The best fused kernel for x [m, K]; that for any product if no other one serves it."""
    chosen = choice(packed, m, dtype, device, is_aligned)
    ways = (chosen.candidate, *(option.candidate for option in chosen.options))
    return next((candidate for candidate in ways if candidate.kind != "decode"), None) or any_product(packed, m)


def invariant_candidate(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device,
                        is_aligned: bool = True) -> Candidate:
    """The kernel and configuration, one for all m, that give a row of x the same bits whatever the other rows are."""
    if BY_EXPERTS.why_not(Product(packed, m, dtype, device, is_aligned)):
        return any_product(packed, m)
    return BY_EXPERTS.candidate(packed, m, BY_EXPERTS.configs(packed, m, device)[0])


def candidates(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device, is_aligned: bool = True,
               ) -> list[Candidate]:
    """All legal candidates for x [m, K]."""
    product = Product(packed, m, dtype, device, is_aligned)
    legal = _stream_candidates(packed, m, dtype, device) if packed.layout.streams else []
    for family in () if packed.layout.streams else FAMILIES:
        if not family.why_not(product) and not (family is ANY_GPU and legal):      # it is slower than other kernels
            legal += family.candidates(product)
    return [*legal, Candidate("decode")]


def kinds(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device, is_aligned: bool = True) -> list[str]:
    """The families for matrix units that serve x [m, K]."""
    product = Product(packed, m, dtype, device, is_aligned)
    return [family.name for family in MATRIX_UNIT if not family.why_not(product)]


def any_product(packed: PackedWeight, m: int) -> Candidate:
    """The candidate that serves any x [m, K]: it decodes weight by weight, and a program takes one row of x."""
    return ANY_PRODUCT.candidate(packed, m, ANY_PRODUCT.configs(packed, m, packed.device)[0])


def rounds_weights(packed: PackedWeight, candidate: Candidate, dtype: torch.dtype) -> bool:
    """Whether a candidate rounds weights, or the numbers of their table, to x's dtype before it multiplies."""
    if candidate.config.get("SCALED"):
        return True
    if candidate.kind in ("decode", ANY_GPU.name):
        copied = packed.variant.copies                           # weights that are stored numbers; others are float32
        kind = "f32" if copied is None else str(packed.params.get(copied, packed.variant.fields[copied].type))
        return torch.promote_types(torch_dtype(kind), dtype) != dtype
    return candidate.kind != ANY_PRODUCT.name and packed.layout.kernels.rounds_tables(dtype, packed.tensors)


def _stream_candidates(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device) -> list[Candidate]:
    """Candidates of the kernel that decodes an entropy code as it multiplies, for up to stream_kernels.SKINNY_ROWS rows."""
    if m > stream_kernels.SKINNY_ROWS:
        return []
    x, out = (torch.empty(m, columns, dtype=dtype, device=device) for columns in packed.shape[::-1])
    if not configure.has_skinny_streams(x, packed):
        return []
    calls = list(stream_kernels.skinny_calls(x, packed, None, out))
    return [Candidate(call.family, {key: value for key, value in call.constants.items() if isinstance(value, int)}, call.grid)
            for call in calls]


def _choice(packed: PackedWeight, m: int, dtype: torch.dtype, device: torch.device, gpu: Gpu, is_aligned: bool) -> Choice:
    legal = candidates(packed, m, dtype, device, is_aligned)
    modelled = [CandidateCost(candidate, costs.seconds(packed, candidate, m, dtype, gpu)) for candidate in legal]
    options = tuple(sorted(modelled, key=lambda option: option.seconds))
    file = {} if device.type == "meta" else configure.read_tuned(configure.tuned_file(device))
    timed: Any = file.get(configure.key(packed, m, dtype))
    for option in options if isinstance(timed, dict) else ():
        if (option.candidate.kind, option.candidate.config) == (timed.get("kind"), timed.get("config")):
            return Choice(option.candidate, options, True)
    return Choice(options[0].candidate, options)
