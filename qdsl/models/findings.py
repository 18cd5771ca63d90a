"""Lists what a checkpoint says that a model does not compute: settings of its producer, and tensors without a place."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from qdsl.checkpoint.checkpoint import Checkpoint
from qdsl.checkpoint.detect.gguf_keys import LLAMA_CPP
from qdsl.checkpoint.detect.ledger import Finding, Kind
from qdsl.checkpoint.detect.neighbors import group_findings, is_bias, kind_of
from qdsl.checkpoint.detect.sources import FolderSource
from qdsl.checkpoint.files.folder import Folder
from qdsl.jobs.engine import RewriteError
from qdsl.models.names import Names
from qdsl.models.plan import LoadPlan, Rename, renamed
from qdsl.models.private_apis import may_be_unexpected
from qdsl.models.shapes import model_on_meta


def findings(checkpoint: Checkpoint, plan: LoadPlan, names: Names, rename: Rename | None, model: nn.Module | None,
             ) -> list[Finding]:
    """What a checkpoint says that the model does not compute.  model: None where a library looks for tensors without a place."""
    source, placed = checkpoint.source, {*plan.plain.values()}
    claims = [finding for finding in source.findings if (finding.place or finding.key not in placed)
              and not (model is None and finding.key.startswith(f"{LLAMA_CPP}."))]       # which that library's quantizer adds
    if model is None or not isinstance(source, FolderSource):
        return claims
    judged = {full for layer in source.layers.values() for leaf, full in layer.others.items() if not is_bias(leaf)}
    return [*claims, *unplaced_findings(source, names, {
        full: own for full in plan.unused if full not in judged and (own := renamed(full, rename)) is not None}, model)]


def unplaced_findings(source: FolderSource, names: Names, tensors: Mapping[str, str], model: nn.Module) -> list[Finding]:
    """Tensors of modules that a model has, with which these modules do not compute; biases of zeros change nothing.

    So are those of further modules inside of a layer or of a numbered block, and of experts that the model has in one parameter.

    tensors: to their names in the model.
    """
    ignored = [re.compile(pattern) for pattern in may_be_unexpected(model)]
    modules = names.modules.keys() - {""}
    unknown = {full: kind for full, own in tensors.items()
               if (_is_inside(own, modules) or _has_weight_in_use(source, full.rpartition(".")[0], tensors))
               and (kind := kind_of(full, Kind.UNKNOWN)) is not None and kind[0] is Kind.UNKNOWN
               and not any(pattern.search(own) for pattern in ignored)
               and not (is_bias(own.rpartition(".")[2]) and not source.tensor(full).any())}
    return group_findings(source.folder, unknown)


def _is_inside(own: str, modules: Collection[str]) -> bool:
    """Whether a tensor is of a module that a model has, or of one more inside of its numbered blocks, such as `layers.0`."""
    parts = own.split(".")[:-1]
    depth = next((depth for depth in range(len(parts), 0, -1) if ".".join(parts[:depth]) in modules), 0)
    return depth > 0 and (depth == len(parts) or any(part.isdigit() for part in parts[:depth]))


def _has_weight_in_use(source: FolderSource, module: str, unused: Mapping[str, str]) -> bool:
    """Whether the model computes with the weight of a module of the checkpoint."""
    layer, weight = source.layers.get(module), f"{module}.weight"
    stored = [weight] if layer is None else list(layer.tensors.values())
    return (layer is not None or weight in source.folder) and not any(full in unused for full in stored)


def biases_without_place(folder: Folder) -> list[Finding]:
    """Biases with which the class of a folder's config does not compute, though it computes with the weight next to them.

    [] where no library builds the class; biases of zeros change nothing.
    """
    biases = {full: kind for full in folder.names() if is_bias(full.rpartition(".")[2])
              and (kind := kind_of(full, Kind.UNKNOWN)) is not None and kind[0] is Kind.UNKNOWN}
    try:
        model = model_on_meta(folder) if biases else None
    except RewriteError:
        return []
    if model is None:
        return []
    names = Names(model)
    tensors, target = {*names.parameters, *names.buffers}, _target(model)
    ignored = [re.compile(pattern) for pattern in may_be_unexpected(model)]
    return group_findings(folder, {full: kind for full, kind in biases.items() if (own := target(full)) not in tensors
                                   and (own.rpartition(".")[0] in names.modules.keys() - {""}
                                        or target(f"{full.rpartition('.')[0]}.weight") in tensors)
                                   and not any(pattern.search(own) for pattern in ignored) and bool(folder.tensor(full).any())})


def _target(model: Any) -> Callable[[str], str]:
    """The model's name of a tensor of a checkpoint: a function, by the rules of the model's library."""
    if not hasattr(model, "base_model_prefix"):                  # of diffusers
        return lambda name: name
    from qdsl.models.conversions import Conversions

    names = Conversions.of(model)
    return lambda name: names.target(name)[0]
