"""Layers that engines fuse into one matmul, and whose scales of the whole weight must therefore be equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from qdsl.checkpoint.detect.layer import Layer
from qdsl.core.siblings import SIBLINGS

# vLLM and others join these along N.  llm-compressor and ModelOpt give their NVFP4 weights one scale.
_FAMILY = {name: names for names in SIBLINGS for name in names}


def fused_layers(layers: Iterable[Layer]) -> Mapping[str, tuple[Layer, ...]]:
    """By layer name, the layers that engines fuse with it, itself included, in the order of `layers`."""
    families: dict[tuple[str, tuple[str, ...]], list[Layer]] = defaultdict(list)
    for layer in layers:
        parent, _, name = layer.name.rpartition(".")
        if name in _FAMILY and layer.experts is None:
            families[parent, _FAMILY[name]].append(layer)
    return {layer.name: tuple(family) for family in families.values() if len(family) > 1 for layer in family}
