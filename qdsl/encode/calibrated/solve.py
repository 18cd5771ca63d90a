"""Quantizes a weight for the inputs of its layer: the error of each column is carried to the columns that follow (GPTQ).

    H = mean of x x^T         what a change e of a row of w costs is e H e^T
    R D R^T = H               R is upper triangular with a unit diagonal, D diagonal

    columns, those with the largest diagonal of H first:
        codes[k] = nearest(w[k] + slope[k]);  e[k] = value[k] - w[k]
        slope[later] -= e[k] * R[k, later]

Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers, 2022, computes the same from
the inverse of H.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qdsl.core.options import GPTQ as GPTQ
from qdsl.core.options import IMPORTANCE as IMPORTANCE
from qdsl.core.options import METHODS as METHODS
from qdsl.encode.calibrated.affine import Columns, affine
from qdsl.encode.calibrated.descent import Descent, descend
from qdsl.encode.calibrated.hessian import Hessian
from qdsl.encode.calibrated.hessian import factor as factor_of
from qdsl.encode.calibrated.joint import JointCodes, joint_codes
from qdsl.encode.calibrated.levels import Levels, Vectors, code_choices, code_field, levels, vectors
from qdsl.encode.calibrated.scales import CLIPS, quantize_clipped
from qdsl.host import progress
from qdsl.runtime.weight import tiles
from qdsl.runtime.weight.packed import FormatError, PackedWeight

if TYPE_CHECKING:
    from qdsl.runtime.format import Format

STEP = 128                                                       # columns whose errors reach the others by one product
SCALES, CODES = 1 / 8, 1 / 2                                     # of the time; the rest is spent on all fields once more


def quantize(format: Format, weight: Tensor, hessian: Hessian, method: str = GPTQ, power: float = 1, **options: Any,
             ) -> PackedWeight:
    """Quantizes a float weight [N, K] so that the outputs for the inputs of `hessian` change least.

    method: GPTQ, or IMPORTANCE to choose scales alone by the mean squares of columns.  power: their exponent.  options: those of
    the format's `quantize`, storage too.  Returns round to nearest where the compensated weight has the larger loss.  Raises
    FormatError for a format that has no quantizer, and as `quantize` does.
    """
    if weight.shape[1:] != hessian.matrix.shape[1:]:
        raise FormatError(f"{format.name}: the weight has {weight.shape[1]} columns, and its inputs had {len(hessian.matrix)}")
    weight = weight.detach().float()
    trials = 1 if any(variant.importance for variant in format.variants.values()) else 2 + len(CLIPS)
    with progress.step_share((1 if method == IMPORTANCE else SCALES) * weight.numel(), trials):
        packed, fields = quantize_clipped(format, weight, hessian.importance ** power, options)
    if method == IMPORTANCE:
        return packed
    code = code_field(packed.variant)
    with progress.step_share(CODES * weight.numel(), weight.numel()):
        if code:
            solved = quantize_codes(packed, fields, code, weight, hessian)
        elif own := vectors(packed, fields):
            _solve(own, weight, hessian)
            solved = format.pack({**fields, **own.fields}, packed.storage, **packed.params)
        elif joint := joint_codes(packed, fields):
            _solve(joint, weight, hessian)
            solved = format.pack({**fields, joint.field: joint.codes}, packed.storage, **packed.params)
        else:
            solved = _chunked(format, packed, weight, hessian, power, options)
    state = Descent(solved, weight, hessian)
    if solved is not packed and hessian.loss(format.dequantize(packed, torch.float32).sub_(weight)) < state.loss:
        state = Descent(packed, weight, hessian)
    with progress.step_share((1 - SCALES - CODES) * weight.numel(), weight.numel()):
        return descend(state)


def quantize_codes(packed: PackedWeight, fields: dict[str, Tensor], code: str, weight: Tensor, hessian: Hessian) -> PackedWeight:
    """The weight with compensated codes; its other fields stay, and so does `packed`."""
    choices = code_choices(packed, fields[code], code)
    kind = affine(packed, code, 1)
    codes = torch.empty_like(fields[code])                       # fields may be views of the weight's tensors
    for start, stop in tiles.row_tiles(packed):
        part = packed.cut("N", start, stop)
        own = packed.format.unpack(part)
        chosen = levels(part, own, code, choices) if kind is None else Columns.of(part, own, code, kind)
        _solve(chosen, weight[start:stop], hessian)
        codes[start:stop] = chosen.codes.T.contiguous().view(codes.dtype)
    return packed.format.pack({**fields, code: codes}, packed.storage, **packed.params)


def _solve(chosen: Columns | JointCodes | Levels | Vectors, weight: Tensor, hessian: Hessian) -> None:
    """Choose the codes of rows [rows, K]: column by column, those with the largest inputs first, or runs of columns in order."""
    if isinstance(chosen, JointCodes):
        order = chosen.order(hessian.importance)
        factor, pivots = factor_of(hessian.matrix[order][:, order])
    else:
        is_sorted = not isinstance(chosen, Vectors) or chosen.step == 1
        order = hessian.order if is_sorted else torch.arange(weight.shape[1], device=weight.device)
        factor, pivots = hessian.factor(is_sorted)
    work = weight.T[order].contiguous()                          # [K, rows], columns in the order
    slopes = torch.zeros_like(work)
    for start in range(0, len(work), STEP):
        own = slice(start, min(start + STEP, len(work)))
        inner = factor[own, own]
        changes = chosen.choose(order[own], work[own], slopes[own], inner) if isinstance(chosen, Columns | Levels) else \
            chosen.choose(order[own], work[own], slopes[own], inner, pivots[own])
        slopes[own.stop:].addmm_(factor[own, own.stop:].T, changes, alpha=-1)
        progress.advance_units(changes.numel())


def _chunked(format: Format, packed: PackedWeight, weight: Tensor, hessian: Hessian, power: float, options: Mapping[str, Any],
             ) -> PackedWeight:
    """The weight quantized by runs of columns; the error of each run is carried to those that follow."""
    step = packed.step("K")
    if step >= weight.shape[1] or packed.variant.cuts[1] == "1":
        return packed
    factor, _ = hessian.factor(is_sorted=False)
    slopes, parts = torch.zeros_like(weight.T), []
    for start in range(0, len(slopes), step):
        own = slice(start, min(len(slopes), start + step))
        wanted = torch.linalg.solve_triangular(factor[own, own].T, slopes[own], upper=False)
        part = format.quantize((weight.T[own] + wanted).T.contiguous(), importance=hessian.importance[own] ** power, **options)
        parts.append(part)
        changes = format.dequantize(part, torch.float32).T - weight.T[own]
        slopes[own.stop:].addmm_(factor[own, own.stop:].T, changes, alpha=-1)
    return PackedWeight.join(parts, "K")
