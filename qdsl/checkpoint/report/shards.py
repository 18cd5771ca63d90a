"""Which rows and columns of a checkpoint's layers each rank of tensor parallelism stores, computed from headers.  No torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from qdsl.checkpoint.detect.descriptions import description_of, descriptions
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, shown
from qdsl.core.borders import UNITS, StoredSpan, piece_step, shard_step, slice_targets, span
from qdsl.core.stored import Description
from qdsl.core.transforms import Transform

MOST_PADDING = 4                                                 # a rank stores at most this many times the rows it needs
GROUP_ROWS = 32                                                  # a multiple of the rows of an entropy code's groups
STREAMED = "gpt_oss"                                             # the model type whose experts vLLM takes by names of its own
STREAMED_NAMES = {"gate_up_proj": "w13", "down_proj": "w2"}
STREAMED_SUFFIXES = ("_weight", "_weight_scale", "_weight_packed")


class ShardError(CheckpointError):
    """A layer that cannot be divided among the ranks; the message names it, the reason and a remedy."""


@dataclass(frozen=True, slots=True)
class RankPiece:
    """The part of a layer of a checkpoint that one rank stores.

    layer: the whole layer of the checkpoint.  span: the rows (dim 'N') or columns ('K').  how: how a weight of them is computed
    from the checkpoint's tensors, as text: 'cut', 'packed again', ...
    """

    layer: Layer
    span: StoredSpan
    how: str


def merged_pieces(name: str, layers: Sequence[Layer], parts: Sequence[tuple[int, int]], ranks: int, rank: int) -> list[RankPiece]:
    """A rank's pieces of a layer whose rows are divided among ranks: one piece for each merged part, such as q, k, v or gate, up.

    name: of the model's layer, for messages.  layers: of the checkpoint; each has the rows of one or more parts.
    parts: for each part the rows of one rank, and the rows of the whole part.  Several ranks get the same rows where heads are
    fewer than ranks, as key and value heads.  Raises ShardError.
    """
    pieces: list[RankPiece] = []
    left = list(parts)
    for layer in layers:
        _check(name, layer)
        start = 0
        while start < layer.shape[0] and left:
            own, whole = left.pop(0)
            copies = ranks * own // whole if own and ranks * own % whole == 0 else 0
            if not copies or whole % own or ranks % copies:
                raise ShardError(f"{shown(name)}: {whole} rows of {shown(layer.name)} cannot be divided among {ranks} ranks")
            first = start + rank // copies * own
            pieces.append(piece(name, layer, "N", first, first + own, ranks))
            start += whole
        if start != layer.shape[0]:
            raise ShardError(f"{shown(name)}: {shown(layer.name)} has {layer.shape[0]} rows, and the model's layer "
                             f"{' + '.join(str(whole) for _, whole in parts)}")
    if left:
        raise ShardError(f"{shown(name)}: the checkpoint lacks parts; it has {', '.join(shown(layer.name) for layer in layers)}")
    return pieces


def row_piece(name: str, layer: Layer, ranks: int, rank: int) -> RankPiece:
    """A rank's piece of a layer whose columns are divided among ranks, such as o_proj and down_proj.  Raises ShardError."""
    _check(name, layer)
    k = layer.shape[1]
    if k % ranks:
        raise ShardError(f"{shown(name)}: {k} columns cannot be divided among {ranks} ranks")
    return piece(name, layer, "K", rank * k // ranks, (rank + 1) * k // ranks, ranks)


def vocabulary_rows(rows: int, ranks: int, rank: int, padding: int = 64) -> tuple[int, int]:
    """The rows [start, stop) of a vocabulary that one rank stores.  padding: the rows of all ranks are a multiple of it."""
    own = -(-rows // padding) * padding // ranks
    return min(rank * own, rows), min((rank + 1) * own, rows)


def piece(name: str, layer: Layer, dim: str, start: int, stop: int, ranks: int = 1) -> RankPiece:
    """Rows ('N') or columns ('K') [start, stop) of a layer.  ranks: the number of ranks, for the message.

    Raises ShardError for a layer that is not recognised, and where a rank would hold more than MOST_PADDING times its part.
    """
    _check(name, layer)
    whole = layer.shape[dim == "K"]
    step, how = _step_and_method(layer, dim, start, stop)
    own = span(dim, start, stop, whole, step)
    if layer.act_order and dim == "K":
        own = _with_all_groups(layer, own, step)
    if own.last - own.first > MOST_PADDING * (stop - start):
        raise ShardError(f"{shown(name)}: {shown(layer.name)}, {layer.format}.{layer.storage} {list(layer.shape)}, cannot be "
                         f"divided among {ranks} ranks along {dim}: {UNITS[dim]} {start} to {stop} lie in blocks of {step}; "
                         f"{_remedy(layer, dim, whole, ranks)}")
    extra = f"; {own.last - own.first - (stop - start)} {UNITS[dim]} more than its own" if own.is_padded else ""
    return RankPiece(layer, own, how + extra)


def _check(name: str, layer: Layer) -> None:
    if problem := why_unservable(layer):
        raise ShardError(f"{shown(name)}: {problem}")


def why_transforms(transforms: Sequence[Transform]) -> str:
    """Why a layer with transforms cannot be served."""
    return f"the layer transforms x ({transforms[0].label}), which no engine does; quantize the model without that"


def why_unservable(layer: Layer) -> str:
    """Why a layer cannot be served in its packed form on any number of ranks; '' where it can."""
    if layer.transforms:
        return why_transforms(layer.transforms)
    return f"{shown(layer.name)} is not recognised: {layer.why}" if layer.why else ""


def _step_and_method(layer: Layer, dim: str, start: int, stop: int) -> tuple[int, str]:
    """The step at whose multiples a piece can begin, and how its weight is computed."""
    format, whole = description_of(layer.format), layer.shape[dim == "K"]
    stored = format.layout(layer.storage, layer.params).values()
    if (start, stop) == (0, whole):
        return whole, "whole"
    if layer.act_order and dim == "K":
        sizes = format.sizes_for(layer.params, layer.shape)
        terms = [term for tensor in stored for axis in tensor.axes for term in axis.terms]
        steps = [term.by(sizes) for term in terms if term.dim == "K" and term.exact]
        return math.lcm(*steps), "packed again, with all groups"
    for storage, params in slice_targets(format, layer.storage, layer.params, layer.shape):
        step = piece_step(format, layer.params, layer.shape, dim, storage, params)
        if start % step or (stop % step and stop != whole) or (layer.act_order and storage != layer.storage):
            continue
        axes = {axis.dim for tensor in stored for axis in tensor.axes}
        if "?" in axes:                                          # an entropy code
            ends_groups = not any(border % GROUP_ROWS and border != whole for border in (start, stop))
            return step, "cut" if dim == "N" and "N*K" not in axes and ends_groups else "decoded and encoded again"
        changes = [f"{key}={value}" for key, value in params.items() if value != layer.params[key]]
        changes += [f"storage {storage}"] if storage != layer.storage else []
        return step, f"packed again with {', '.join(changes)}" if changes else "cut"
    return shard_step(format, layer.storage, layer.params, layer.shape, dim), "cut"


def _with_all_groups(layer: Layer, own: StoredSpan, step: int) -> StoredSpan:
    """The columns that a rank stores of an act-order weight: enough that its smallest groups are as many as those of the whole
    weight.
    """
    format, k = description_of(layer.format), layer.shape[1]
    sizes = [(name, [int(value) for value in format.params[name] if int(value) > 0]) for name, axis in format.sizes.items()
             if axis == "K"]
    needed = math.prod(-(-k // format.sizes_for(layer.params, layer.shape)[name]) * min(values) for name, values in sizes)
    extra = max(0, needed - (own.last - own.first))
    last = min(k, own.last + -(-extra // step) * step)
    first = max(0, own.first - -(-max(0, needed - (last - own.first)) // step) * step)
    return StoredSpan(own.dim, own.start, own.stop, first, last)


def _remedy(layer: Layer, dim: str, whole: int, ranks: int) -> str:
    """The largest smaller number of ranks that a layer can be divided among, as text for a message."""
    for fewer in range(ranks - 1, 1, -1):
        if ranks % fewer == 0 and whole % fewer == 0:
            try:
                for rank in range(fewer):
                    piece("", layer, dim, rank * whole // fewer, (rank + 1) * whole // fewer)
            except ShardError:
                continue
            return f"it can be divided among {fewer}; or quantize the layer in smaller blocks"
    return "quantize the layer in smaller blocks, or serve it on one rank"


def packed_layers(folder: Folder) -> dict[str, Layer]:
    """The packed layers of a checkpoint by name, experts of a stack one by one; unrecognised layers included."""
    is_streamed = folder.config.get("model_type") == STREAMED
    return {single.name: single for layer in layers(folder).layers
            for single in single_experts(with_act_order(folder, layer), is_streamed)}


def single_experts(layer: Layer, is_streamed: bool = False) -> list[Layer]:
    """The experts 'experts.3.up_proj' of a stack 'experts.up_proj', tensors named as the storage names them; [layer] for any
    other layer.

    is_streamed: 'experts.3.w13', as vLLM takes experts of gpt-oss: with tensors 'w13_weight' and 'w13_weight_scale'.
    """
    if layer.experts is None:
        return [layer]
    stem, _, last = layer.name.rpartition(".")
    suffixes: Mapping[str, str] = {own: f".{own}" for own in layer.tensors}
    if is_streamed:
        last, suffixes = STREAMED_NAMES[last], dict(zip(layer.tensors, STREAMED_SUFFIXES, strict=False))
    names = [f"{stem}.{expert}.{last}" for expert in range(layer.experts)]
    return [replace(layer, name=name, experts=None, transposed=False,
                    tensors={own: name + suffix for own, suffix in suffixes.items()}) for name in names]


def plain_layers(folder: Folder) -> dict[str, Layer]:
    """The unquantized matrices `NAME.weight` of a checkpoint as layers of plain formats, by name."""
    result: dict[str, Layer] = {}
    for full in folder.names():
        entry, name = folder.entry(full), full.removesuffix(".weight")
        if name != full and entry.dtype in _of_numbers() and len(entry.shape) == 2:
            result[name] = plain_layer(name, entry.dtype, (entry.shape[0], entry.shape[1]))
    return result


def plain_layer(name: str, dtype: str, shape: tuple[int, int]) -> Layer:
    """The unquantized matrix `NAME.weight` as a layer.  dtype: its safetensors dtype."""
    format = _of_numbers()[dtype]
    storage, tensors = next(iter(format.variants[()].items()))
    return Layer(name, format.name, storage, {}, shape, tensors={next(iter(tensors)): f"{name}.weight"})


def is_plain(layer: Layer) -> bool:
    """Whether a layer is an unquantized matrix."""
    return layer.format in [format.name for format in _of_numbers().values()]


@cache
def _of_numbers() -> dict[str, Description]:
    """The formats of unquantized numbers, by their safetensors dtype."""
    return {str(format.detect["safetensors"]): format for format in descriptions() if "safetensors" in format.detect}


def with_act_order(folder: Folder, layer: Layer) -> Layer:
    """The layer, with `act_order` set where an index tensor assigns its columns to groups out of order.  Reads that tensor."""
    format = next((form for form in descriptions() if form.name == layer.format), None)
    layout = {} if format is None else format.layout(layer.storage, layer.params)
    for name, full in layer.tensors.items():
        if format is None or (layout[name].dtype != "index" and layout[name].optional != name) or layer.experts is not None:
            continue
        data = folder.file(full).start(full, folder.entry(full).nbytes)
        code = "H" if layout[name].dtype == "i16" else "q" if folder.entry(full).dtype == "I64" else "i"
        values = struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)
        sizes = format.sizes_for(layer.params, layer.shape)
        group = 1 if layout[name].optional == name else next(sizes[key] for key, axis in format.sizes.items() if axis == "K")
        in_order = [place // group for place in range(len(values))]
        if set(values) not in ({0}, {-1}) and list(values) != in_order:
            return replace(layer, act_order=True)
    return layer
