"""The tensors of a checkpoint as serving engines take them, one weight at a time.

Files may store them in other ways: experts in a stack, weights in DF11 groups, blocks of a GGUF file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qdsl.checkpoint.detect import layer_weights
from qdsl.checkpoint.detect.groups import Group
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.detect.ledger import Finding
from qdsl.checkpoint.detect.quantization import quantizations
from qdsl.checkpoint.files.components import gguf_files
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.gguf import GgufFile, is_gguf
from qdsl.checkpoint.files.references import local_path
from qdsl.checkpoint.files.safetensors import CheckpointError, dtype_of, shown
from qdsl.checkpoint.report.shards import (
    STREAMED,
    ShardError,
    packed_layers,
    plain_layer,
    plain_layers,
    single_experts,
    why_transforms,
)
from qdsl.core.siblings import MERGED
from qdsl.core.stored import INPUT_SCALE
from qdsl.models.findings import biases_without_place
from qdsl.models.gguf_maps import map_of
from qdsl.models.mapped_source import MappedSource, gguf_source
from qdsl.models.shapes import model_shapes
from qdsl.runtime.weight.packed import PackedWeight


class ArrivedTensors(dict[str, Tensor]):
    """Tensors that a loader has brought so far, by their names in the checkpoint."""

    path = Path("the loader")

    def tensor(self, name: str) -> Tensor:
        return self[name]


@dataclass(frozen=True, slots=True)
class TensorAssembly:
    """Tensors of a checkpoint that are converted to others once all of them have been loaded.

    names: of the loaded tensors.  make: returns the converted ones, with their names.  unused: names of tensors to drop.
    """

    names: frozenset[str]
    make: Callable[[ArrivedTensors], Iterable[tuple[str, Tensor]]]
    unused: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Served:
    """The layers of a checkpoint under the names of engines, read from headers.

    packed: by name; weights of groups (DF11) are plain layers here, to be quantized one by one.  plain: other unquantized
    matrices.  assemblies: how tensors of the files are converted to those of the layers.  quantizing_x: names of layers
    whose x the checkpoint wants quantized to 8 bits, by its settings or by a static scale.  path: the folder or file.
    is_gguf: whether it is a GGUF file, which no engine loads by itself.  findings: settings and tensors with which qdsl does not
    compute.
    """

    packed: dict[str, Layer] = field(default_factory=dict)
    plain: dict[str, Layer] = field(default_factory=dict)
    assemblies: tuple[TensorAssembly, ...] = ()
    quantizing_x: frozenset[str] = frozenset()
    path: Path = Path()
    is_gguf: bool = False
    findings: tuple[Finding, ...] = ()

    @classmethod
    def of_folder(cls, path: Path) -> Served:
        """The layers of a folder of safetensors.  Raises CheckpointError, RewriteError for groups of unknown shapes.

        Raises ShardError for layers that transform x, packed or plain: engines compute none of that.
        """
        with Folder(path) as folder:
            survey, packed = layers(folder), packed_layers(folder)
            transforms = {layer.name: layer.transforms for layer in packed.values() if layer.transforms} | dict(survey.transforms)
            for name, of_layer in transforms.items():
                raise ShardError(f"{path}: {shown(name)}: {why_transforms(of_layer)}")
            is_streamed = folder.config.get("model_type") == STREAMED
            assemblies = [TensorAssembly(frozenset(layer.tensors.values()), partial(_unstacked, layer, is_streamed))
                          for layer in survey.layers if layer.experts is not None]
            shapes = model_shapes(folder) if survey.groups else {}
            for group in survey.groups:
                own = _shapes_of(group, shapes)
                assemblies.append(TensorAssembly(frozenset(group.tensors.values()), partial(_decoded_group, group, own)))
                members = [plain_layer(name.removesuffix(".weight"), "BF16", shape) for name, shape in own.items()]
                packed |= {layer.name: layer for layer in members}
            settings = quantizations(folder)
            quantizing_x = frozenset(name for name, layer in packed.items()
                               if INPUT_SCALE in layer.others or any(own.has_8_bit_inputs(name) for own in settings))
            return cls(packed, plain_layers(folder), tuple(assemblies), quantizing_x, path,
                       findings=(*survey.findings, *biases_without_place(folder)))

    @classmethod
    def of_gguf(cls, source: MappedSource) -> Served:
        """The layers of a GGUF file."""
        packed = {single.name: single for layer in source.layers.values() if not _is_parameter(source, layer)
                  for single in _singles(layer)}
        plain = {layer.name: layer for name in source.plain for layer in _plain_singles(source, name)}
        return cls(packed, plain, path=source.path, is_gguf=True)


def assembled(weights: Iterable[tuple[str, Tensor]], assemblies: Iterable[TensorAssembly]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a checkpoint, with those of each assembly replaced by the converted ones."""
    by_name: dict[str, tuple[TensorAssembly, ArrivedTensors]] = {}
    for assembly in assemblies:
        by_name |= dict.fromkeys(assembly.names | assembly.unused, (assembly, ArrivedTensors()))
    for name, tensor in weights:
        if name not in by_name:
            yield name, tensor
            continue
        assembly, arrived = by_name[name]
        if name in assembly.names:
            arrived[name] = tensor
        if arrived.keys() == assembly.names:
            yield from assembly.make(arrived)
            arrived.clear()


def decoding(layer: Layer, dtype: torch.dtype) -> TensorAssembly:
    """An assembly that decodes the tensors of a packed layer to `NAME.weight`."""
    unused = {full for leaf, full in layer.others.items() if leaf != "bias"} | set(layer.settings)
    return TensorAssembly(frozenset(layer.tensors.values()), partial(_decoded, layer, dtype), frozenset(unused))


def _decoded(layer: Layer, dtype: torch.dtype, arrived: ArrivedTensors) -> Iterator[tuple[str, Tensor]]:
    weight, = layer_weights.weights(arrived, layer)
    yield f"{layer.name}.weight", weight.format.dequantize(weight, dtype)



def _unstacked(layer: Layer, is_streamed: bool, arrived: ArrivedTensors) -> Iterator[tuple[str, Tensor]]:
    for single, tensors in zip(single_experts(layer, is_streamed), layer_weights.tensors(arrived, layer), strict=True):
        yield from ((full, tensors[own]) for own, full in single.tensors.items())


def _shapes_of(group: Group, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """The (N, K) of a group's weights.  Raises ShardError for an unreadable group, and for a weight that is no matrix."""
    own = {name: shapes.get(name, ()) for name in group.parts}
    wrong = [f"{shown(name)} has {count} numbers, and is {list(own[name])} in the model" for name, count in group.parts.items()
             if len(own[name]) != 2 or math.prod(own[name]) != count]
    if problems := [*group.errors, *wrong]:
        raise ShardError(f"{shown(group.name)}: {problems[0]}")
    return {name: (shape[0], shape[1]) for name, shape in own.items()}


def _decoded_group(group: Group, shapes: Mapping[str, tuple[int, int]], arrived: ArrivedTensors) -> Iterator[tuple[str, Tensor]]:
    for name, row in layer_weights.decoded(arrived, group).items():
        yield name, row.view(shapes[name])


# -- GGUF files ----------------------------------------------------------------------------------------------------------


def open_gguf(path: Path, config: Any) -> MappedSource:
    """A GGUF file of a language model under the names of transformers.  config: the model's, of transformers.

    Raises LoadError for a model without a recorded map, and for a file that does not fit; CheckpointError for damage.
    """
    import transformers

    with GgufFile(path) as file:
        own = map_of(config.model_type, str(file.metadata["general.architecture"]))
    with torch.device("meta"):
        model = getattr(transformers, own.model_class)(config)
    return gguf_source(path, own, model, config)


def source_tensors(source: MappedSource) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a GGUF file under the names of `Served.of_gguf`."""
    for name in source.plain:
        tensor, singles = source.tensor(name), _plain_singles(source, name)
        if not singles:
            yield name, tensor
            continue
        matrices = tensor.to(_dtype(source, name)).view(-1, *singles[0].shape)
        yield from ((f"{single.name}.weight", matrix) for single, matrix in zip(singles, matrices, strict=True))
    for layer in source.layers.values():
        if _is_parameter(source, layer):
            yield layer.name, source.tensor(layer.name)
            continue
        singles, weights = _singles(layer), source.weights(layer)
        count = len(weights) // len(singles)                     # gate and up of an expert come one by one
        for place, single in enumerate(singles):
            weight = PackedWeight.join(weights[place * count:(place + 1) * count])
            yield from ((full, weight.tensors[own]) for own, full in single.tensors.items())


def _is_parameter(source: MappedSource, layer: Layer) -> bool:
    """Whether a layer is a parameter of a larger module, such as a padding token, and takes plain numbers."""
    return layer.experts is None and layer.name in source.rules


def _singles(layer: Layer) -> list[Layer]:
    """The layer, or its experts, with tensors named as in its storage."""
    named = {own: f"{layer.name}.{own}" for own in layer_weights.layout_of(layer)} if not layer.why else {}
    return single_experts(replace(layer, tensors=named))


def _plain_singles(source: MappedSource, name: str) -> list[Layer]:
    """A plain parameter as layers: itself, or gate, up and down of each expert; [] for one that engines take as it is."""
    shape, (stem, _, last) = source.shape(name), name.rpartition(".")
    dtype = dtype_of(str(_dtype(source, name)))
    if len(shape) == 2 and last == "weight":
        return [plain_layer(stem, dtype, (shape[0], shape[1]))]
    if len(shape) != 3 or not stem.endswith("experts") or source.rules[name].transposed:
        return []
    parts = MERGED.get(last, (last,))                            # engines take gate and up one by one
    return [plain_layer(f"{stem}.{expert}.{part}", dtype, (shape[1] // len(parts), shape[2]))
            for expert in range(shape[0]) for part in parts]


def _dtype(source: MappedSource, name: str) -> torch.dtype:
    """The dtype of a plain parameter: that of the file where weights have it, else float32."""
    dtype = source.dtype(name)
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


def gguf_path(model: str | Path, ref: str | None = None) -> Path | None:
    """The local GGUF file of a model's weights, downloaded if remote; None for a folder of safetensors.

    ref: to the file, as `qdsl.open` takes it; without one the model is the file, or a folder that has one.  Raises
    CheckpointError for a folder that has several, and what `local_path` raises.
    """
    if ref is not None or is_gguf(Path(model)):
        return local_path(ref or model)
    firsts = gguf_files(Path(model)) if not any(Path(model).glob("*.safetensors")) else []
    if len(firsts) > 1:
        raise CheckpointError(f"{model} has {len(firsts)} GGUF files; name one as \"gguf_model\" of the quantization_config")
    return firsts[0] if firsts else None
