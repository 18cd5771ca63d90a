"""Lists what a checkpoint says that a model does not compute: settings of its producer, and tensors without a place."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from qdsl.checkpoint.checkpoint import Checkpoint
from qdsl.checkpoint.detect.ledger import Finding, Kind
from qdsl.checkpoint.detect.neighbors import alike, is_bias, kind_of
from qdsl.checkpoint.detect.sources import FolderSource
from qdsl.models.names import Names
from qdsl.models.plan import LoadPlan, Rename, renamed
from qdsl.models.private_apis import may_be_unexpected


def findings(checkpoint: Checkpoint, plan: LoadPlan, names: Names, rename: Rename | None, model: nn.Module | None,
             ) -> list[Finding]:
    """What a checkpoint says that the model does not compute.  model: None where a library looks for tensors without a place."""
    source, placed = checkpoint.source, {*plan.plain.values()}
    claims = [finding for finding in source.findings if finding.place or finding.key not in placed]
    if model is None or not isinstance(source, FolderSource):
        return claims
    judged = {full for layer in source.layers.values() for leaf, full in layer.others.items() if not is_bias(leaf)}
    return [*claims, *without_place(source, names, {
        full: own for full in plan.unused if full not in judged and (own := renamed(full, rename)) is not None}, model)]


def without_place(source: FolderSource, names: Names, tensors: Mapping[str, str], model: nn.Module) -> list[Finding]:
    """Tensors of modules that a model has, with which these modules do not compute; biases of zeros change nothing.

    tensors: to their names in the model.
    """
    ignored = [re.compile(pattern) for pattern in may_be_unexpected(model)]
    unknown = {full: kind for full, own in tensors.items() if own.rpartition(".")[0] in names.modules.keys() - {""}
               and (kind := kind_of(full, Kind.UNKNOWN)) is not None and kind[0] is Kind.UNKNOWN
               and not any(pattern.search(own) for pattern in ignored)
               and not (is_bias(own.rpartition(".")[2]) and not source.tensor(full).any())}
    return alike(source.folder, unknown)
