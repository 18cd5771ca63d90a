"""Fills a model's stacked parameter [E, N, K] from experts that a checkpoint stores one by one."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from torch import Tensor, nn

from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.sources import Source
from qdsl.checkpoint.files.safetensors import dtype_of, shown
from qdsl.checkpoint.report.shards import plain_layer
from qdsl.core.siblings import MERGED

Stacks = Mapping[str, Sequence[Sequence[str]]]                   # parameter -> for every expert, layers of the checkpoint
NUMBERS = ("BF16", "F16", "F32")                                 # dtypes of experts that stay plain beside packed ones
# Layers whose rows follow one another in a parameter, by the last part of its name.
PIECES = {"gate_up_proj": (MERGED["gate_up_proj"], MERGED["w13"]), "down_proj": (("w2",),)}


def usual_stacks(parameters: Mapping[str, Tensor], source: Source, rename: Callable[[str], str | None],
                 format: str | None = None) -> dict[str, list[list[str]]]:
    """Stacks by the usual names: for unfilled parameters of three axes, the packed experts next to them.

    'experts.up' takes 'experts.0.up', 'experts.1.up', ...; 'experts.gate_up_proj' takes gate_proj and up_proj, or w1 and w3.
    One of them may be plain if another is packed.  format: where plain weights are quantized on loading, their format.
    """
    plain = [full.removesuffix(".weight") for full in source.plain if full.endswith(".weight")]
    layers = {own: name for name in (*packed_names(source), *plain) if (own := rename(name)) is not None}
    packed = {rename(name) for name in packed_names(source)} if format is None else layers.keys()
    stacks: dict[str, list[list[str]]] = {}
    for name, parameter in parameters.items():
        if parameter.dim() != 3 or name in layers:
            continue
        parent, _, leaf = name.rpartition(".")
        for pieces in (*PIECES.get(leaf, ()), (leaf,)):
            if len(pieces) > 1 and f"{name}_bias" in parameters:
                continue                                         # as in gpt-oss, whose rows of gate and up alternate
            experts = _layers_of_experts(layers, packed, f"{parent}.".lstrip("."), pieces, parameter.shape[0])
            if experts:
                stacks[name] = experts
    filled = {rename(name) for name in source.plain} if stacks else set()
    return {name: experts for name, experts in stacks.items() if name not in filled}


def packed_names(source: Source) -> list[str]:
    """The names of packed layers, and of those whose weights are coded together."""
    return [*source.layers, *(part.removesuffix(".weight") for group in source.groups for part in group.parts)]


def is_transposed(module: nn.Module, parameter: Tensor) -> bool:
    """Whether a module stores the weights of its experts as [E, K, N]: it states so, or the shapes of up and down tell."""
    declared = getattr(module, "is_transposed", None)            # by transformers' decorator of experts
    if declared is not None:
        return bool(declared)
    up, down = (next((own for name, own in module.named_parameters(recurse=False) if name in names), parameter)
                for names in (("gate_up_proj", "up_proj"), ("down_proj",)))
    return up.shape[2] != down.shape[1] and up.shape[1] == down.shape[2]


def _layers_of_experts(layers: Mapping[str, str], packed: Container[str | None], prefix: str, pieces: Sequence[str], count: int,
                       ) -> list[list[str]]:
    """The checkpoint's layers of at least `count` experts; [] where it has no packed layer of these names."""
    if not any(f"{prefix}{expert}.{piece}" in packed for expert in range(count) for piece in pieces):
        return []
    while f"{prefix}{count}.{pieces[0]}" in layers:
        count += 1
    places = [[f"{prefix}{expert}.{piece}" for piece in pieces] for expert in range(count)]
    return [[layers.get(place, place) for place in expert] for expert in places]


def stacked_layer_shapes(parameters: Mapping[str, Tensor], stacks: Stacks) -> dict[str, tuple[int, int]]:
    """(N, K) of layers that do not state their own: equal shares of the rows of a parameter [E, N, K].

    None for the layers of a module whose parameters are not [E, N, K]: gate and up have as many columns as down has rows.
    """
    shapes = {name: tuple(parameter.shape[1:]) for name in stacks
              if (parameter := parameters.get(name)) is not None and parameter.dim() == 3}
    hidden: dict[str, set[int]] = {}
    for name, (n, k) in shapes.items():
        hidden.setdefault(name.rpartition(".")[0], set()).add(k if len(stacks[name][0]) > 1 else n)
    return {piece: (n // len(pieces), k) for name, (n, k) in shapes.items() for pieces in stacks[name] for piece in pieces
            if n % len(pieces) == 0 and len(hidden[name.rpartition(".")[0]]) == 1}


def why_no_stack(parameter: Tensor | None, source: Source, experts: Sequence[Sequence[str]]) -> str:
    """Why layers of experts cannot fill a parameter; '' where they can."""
    if parameter is None or parameter.dim() != 3:
        return "the model has no parameter [E, N, K] of this name, which experts that the checkpoint has one by one would fill"
    if len(experts) != parameter.shape[0]:
        return f"{parameter.shape[0]} experts in the model, and {len(experts)} in the checkpoint"
    for piece in (piece for pieces in experts for piece in pieces):
        layer = piece_layer(source, piece)
        if layer is None:
            return f"{shown(piece)} is missing in the checkpoint, and other experts are packed"
        if layer.why:
            return f"{shown(piece)} is not recognised: {layer.why}"
        if layer.experts is not None:
            return f"{shown(piece)} is itself a stack of experts"
    every = [[layer for piece in pieces if (layer := piece_layer(source, piece)) is not None] for pieces in experts]
    shapes = {(sum(layer.shape[0] for layer in layers), own.shape[1]) for layers in every for own in layers}
    n, k = next(iter(shapes))
    if len(shapes) > 1 or tuple(parameter.shape[1:]) not in ((n, k), (k, n)):
        stored = " and ".join(str([len(experts), *shape]) for shape in sorted(shapes))
        return f"{list(parameter.shape)} in the model, and {stored} in the checkpoint"
    return ""


def piece_layer(source: Source, piece: str) -> Layer | None:
    """The layer of an expert of a stack, also of one that stayed plain; None for any other tensor, or none."""
    full = f"{piece}.weight"
    if piece in source.layers or full not in source.plain or len(shape := source.shape(full)) != 2:
        return source.layers.get(piece)
    dtype = dtype_of(str(source.tensor(full).dtype))
    return plain_layer(piece, dtype, (shape[0], shape[1])) if dtype in NUMBERS else None
