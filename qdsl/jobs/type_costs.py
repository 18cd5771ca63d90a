"""Measures what each type costs of a layer: how far the predictions of a model move when that layer alone has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qdsl.encode.calibrated import solve, store
from qdsl.encode.calibrated.store import Moments
from qdsl.host import progress as bar
from qdsl.host.files import digest, write_text
from qdsl.jobs.calibrate import Sampling, load_with_samples, tensor_layers
from qdsl.jobs.gguf.mixes import Tensor
from qdsl.jobs.gguf.run import quantizer_of
from qdsl.models.calibrate import calibrate, calibration_bytes, solved_bytes, token_bytes, weights_of
from qdsl.models.sensitivity import PASSES, Sensitivity, sensitivities

if TYPE_CHECKING:
    from qdsl.encode.calibrated.hessian import Hessian

SUFFIX = ".costs.json"
RUNS = 16                                                        # samples that run back through the model, at most
ROWS = 128                                                       # of a matrix, that are quantized to each type


def tensor_costs(path: Path, tensors: Sequence[Tensor], types: Mapping[str, Sequence[str]], sampling: Sampling, folder: Path,
                 progress: Callable[[Mapping[str, int]], Any], device: str | None = None) -> dict[str, dict[str, float]]:
    """What types cost of tensors of a GGUF file, in nats per token; of tensors that can be measured.

    path: the model.  types: of each tensor.  folder: gets the moments of the plain model, and what is measured; what is there is
    not measured again.  progress(amounts): a context that shows the work.
    Raises LoadError, FormatError, CheckpointError and OSError.
    """
    layers = {name: own for name, own in tensor_layers(path, tensors).items() if types.get(name)}
    wanted = {layer: types[name] for name, own in layers.items() for layer in own}
    costs = _layer_costs(str(path), wanted, replace(sampling, sequential=False), folder, progress, device)
    rows = {tensor.name: tensor.rows // tensor.experts for tensor in tensors}
    measured: dict[str, dict[str, float]] = {}
    for name, own in layers.items():
        if counted := [costs[layer] for layer in own if costs[layer]]:
            measured[name] = {type: sum(rows[name] * cost[type] for cost in counted) for type in types[name]}
    return measured


def _layer_costs(model: str, types: Mapping[str, Sequence[str]], sampling: Sampling, folder: Path,
                 progress: Callable[[Mapping[str, int]], Any], device: str | None) -> dict[str, dict[str, float]]:
    """The cost of each type for a row of a layer, by layers; none of a layer that is not measured."""
    place = folder / f"{digest(sorted(types.items()))[:16]}{SUFFIX}"
    costs: dict[str, dict[str, float]] = json.loads(place.read_text()) if place.is_file() else {}
    if costs.keys() >= types.keys():
        return costs
    folder.mkdir(parents=True, exist_ok=True)
    language, tokens = load_with_samples(model, sampling, device, fast=True)
    some = tokens[::-(-len(tokens) // RUNS)]
    amounts = calibration_bytes(language.model, tokens, None, Moments(folder))
    amounts[bar.SAMPLES] += PASSES * sum(map(token_bytes, some))
    weights = weights_of(language.model, "") | {name: table.weight.data for name, table in language.model.named_modules()
                                                if table is language.model.get_input_embeddings()}
    left = {name: weight for name, weight in weights.items() if name in types and name not in costs}
    with progress(amounts | {bar.SOLVE: sum(map(solved_bytes, left.values()))}):
        every = sensitivities(language.model, some)
        calibrate(language.model, tokens, None, lambda block, hessians: store.save(folder, block, hessians), Moments(folder))
        moments = Moments(folder)
        for name, weight in left.items():
            with bar.step(bar.SOLVE, solved_bytes(weight)), bar.step_share(solved_bytes(weight), len(types[name])):
                terms = [term for term in every.get(name, ()) if term.columns is not None or name in moments]
                costs[name] = {}
                for type in types[name] if terms else ():        # an expert without a token has none
                    costs[name][type] = sum(_row_cost(weight, term, type, moments[name] if term.columns is None else None,
                                                      sampling.method) for term in terms)
                    bar.advance_units(1)
            write_text(place, json.dumps(costs))
    return {name: costs.get(name, {}) for name in types}


@torch.no_grad()
def _row_cost(weight: torch.Tensor, term: Sensitivity, type: str, hessian: Hessian | None, method: str) -> float:
    """The cost of a mean row.  Rows are drawn at even distances of the sum of their sensitivities: often where it is large."""
    total = term.rows.double().cpu().cumsum(0)
    count = min(ROWS, len(total))
    drawn = torch.searchsorted(total, (torch.arange(count, device="cpu") + 0.5) / count * total[-1])
    rows = weight[drawn.clamp(max=len(total) - 1).to(weight.device)].float().cpu()
    format = quantizer_of(type).FORMAT
    packed = format.quantize(rows) if hessian is None else solve.quantize(format, rows, hessian, method)
    error = format.dequantize(packed, torch.float32).sub_(rows)
    if hessian is None:
        assert term.columns is not None
        loss = float((error.square() @ term.columns.cpu()).sum(dtype=torch.float64))
    else:
        loss = hessian.loss(error)
    return float(total[-1]) / len(total) * loss / count / 2
