"""Shared code of the plug-ins for vLLM and SGLang: settings, the layers of a checkpoint, and linear layers of packed weights."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.groups import group_rules
from qdsl.checkpoint.detect.ignored import SKIPPED, is_skipped
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.ledger import Finding, Kind, refuse_changes
from qdsl.checkpoint.detect.neighbors import UNKNOWN_EFFECT
from qdsl.checkpoint.detect.rules import OWN
from qdsl.checkpoint.detect.targets import with_storage
from qdsl.checkpoint.files import checksums
from qdsl.checkpoint.report.shards import RankPiece, ShardError, is_plain, merged_pieces, piece, row_piece, why_unservable
from qdsl.core.siblings import MERGED
from qdsl.models.served import Served, assembled, decoding
from qdsl.models.shards import Collector, RankPart, join_parts, linear
from qdsl.runtime.gpu.placement import fastest_storage
from qdsl.runtime.weight import eight

OWN_KEYS = ("quant_method", "method", "format", "skip", "quantize_x", "gguf_model", "verify", "allow_unknown")
AUTO = "auto"                                                    # of quantize_x: where the checkpoint states it
HEADS = {"q": 0, "k": 1, "v": 2}                                 # engines' names for the parts of a layer of q, k and v
# Names of tensors by which loaders find no parameter.  A stack's gate and up come as one layer, which takes that of gate;
# bitsandbytes names tensors after the weight.
RENAMED = ((re.compile(r"(\.experts\.\d+)\.gate_up_proj\."), r"\1.gate_proj."),
           (re.compile(r"\.weight\.(\w+)\."), r".weight_\1_"), (re.compile(r"\.weight\."), ".weight_"))


class EngineConfig:
    """Serves packed checkpoints of any producer, and quantizes plain ones on the way.

    A folder whose config names `quant_method: qdsl` is served without an option, all others with `--quantization qdsl`.
    settings: the config's `quantization_config`.  Keys of qdsl: `format` and its options, to quantize plain Linear layers;
    `skip`, patterns of layers that stay plain; `quantize_x`, to quantize x to 8 bits in matmuls; `gguf_model`, a GGUF file;
    `verify`, to compare files with their checksums; `allow_unknown`, to serve folders with settings or tensors that change the
    model, and that qdsl does not compute or does not know.

    layers: the packed layers by the engine's module names, those to be quantized included.  plain: unquantized matrices, which
    may be parts of a layer whose other parts are packed.  served: names of layers that modules have asked for.
    encoded: names of plain layers of the checkpoint that are quantized while they are loaded.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.packed_modules_mapping: dict[str, list[str]] = {}
        own = dict(settings or {})
        own = own if OWN in (own.get("quant_method"), own.get("method")) else {}
        self.format: str | None = own.get("format")
        skip = own.get("skip") or ()
        self.skip = (skip,) if isinstance(skip, str) else tuple(skip)
        self.quantize_x: bool | str = own.get("quantize_x", False)
        self.gguf_model: str | None = own.get("gguf_model")
        self.verify, self.allow_unknown = bool(own.get("verify", False)), bool(own.get("allow_unknown", False))
        self.options = {key: value for key, value in own.items() if key not in OWN_KEYS}
        if self.format is not None:
            self.format, self.options = with_storage(self.format, self.options)
        self.checkpoint, self.is_planned = Served(), False
        self.layers: dict[str, Layer] = {}
        self.plain: dict[str, Layer] = {}
        self.served: set[str] = set()
        self.modules: dict[str, nn.Module] = {}                  # until weights are loaded, by names of layers of the checkpoint
        self.encoded: set[str] = set()
        self.has_packed_embedding = False
        self.has_warned = False

    def get_name(self) -> str:
        return OWN

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The lowest compute capability of CUDA GPUs, times ten."""
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """[], as settings are in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(config)

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None,
                                     ) -> str | None:
        """'qdsl' for a checkpoint of qdsl, and for one of any producer where the user asks for it."""
        return OWN if user_quant == OWN or hf_quant_cfg.get("quant_method") == OWN else None

    @property
    def batch_invariant(self) -> bool:
        """Whether a row of x gives the same bits whatever the other rows are."""
        return False

    def verified(self, path: Path) -> Path:
        """The same path; with `verify`, CheckpointError where a tensor does not match its checksum."""
        if self.verify:
            checksums.check(path, is_optional=True)
        return path

    def plan(self, checkpoint: Served) -> None:
        """Take a checkpoint's layers, and choose those to be quantized: where none is packed, and a format is set.

        Raises ShardError for a folder without packed layers where no format is set, and for contradictory settings;
        CheckpointError for settings and tensors that are not computed, unless `allow_unknown`.
        """
        for text in refuse_changes(checkpoint.path, checkpoint.findings, self.allow_unknown):
            logging.getLogger("qdsl").warning("%s: not computed: %s", checkpoint.path, text)
        if self.batch_invariant and self.quantize_x and self.quantize_x != AUTO:
            raise ShardError(f"{checkpoint.path}: products that take x in 8 bits are not batch-invariant; leave "
                             '"quantize_x" out of the quantization_config, or serve without batch invariance')
        self.checkpoint, self.is_planned = checkpoint, True
        self.layers, self.plain = self.checkpoint.packed, self.checkpoint.plain
        if not self.layers and (self.format is not None or not checkpoint.is_gguf):
            if self.format not in [format.name for format in descriptions()]:
                raise ShardError(f"{checkpoint.path} has no packed layers, and {self.format!r} is no format to quantize them in; "
                                 'name one as "format" of the quantization_config')
            skipped = (*self.skip, *SKIPPED, "experts")
            self.layers = {name: layer for name, layer in self.plain.items() if not is_skipped(name, skipped)}
        self.encoded = {name for name, layer in self.layers.items() if is_plain(layer)}

    def unserved(self) -> list[Layer]:
        """The packed layers that no module has asked for, after the model is built."""
        return [layer for name, layer in self.layers.items() if name not in self.served and layer.name not in self.encoded]

    def assembled(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a checkpoint under the names that modules expect; decoded for modules that take only plain numbers,
        such as Llama's embedding.  Raises CheckpointError for biases that no module has a place for.
        """
        decoded = [decoding(layer, torch.get_default_dtype()) for layer in self.unserved()]
        for name, tensor in assembled(assembled(weights, self.checkpoint.assemblies), decoded):
            self.check_place(name, tensor)
            for pattern, replacement in RENAMED:
                name = pattern.sub(replacement, name)
            yield name, tensor
        self.modules.clear()

    def collector(self, layer: Layer, pieces: Sequence[RankPiece]) -> Collector:
        """A collector of a layer's tensors, which quantizes a plain layer that is to be packed."""
        if layer.name not in self.encoded:
            return Collector(layer, pieces)
        name = self.format or next(iter(group_rules().values()))["alone"]     # files code these weights together
        return Collector(layer, pieces, partial(import_module(f"qdsl.generated.{name}").quantize, **self.options))

    def quantizing_x(self, part: RankPart, collector: Collector) -> RankPart:
        """A part whose matmuls quantize x to 8 bits: where settings say so (FormatError if its weight is not 8-bit), or with
        'auto' where the checkpoint does.
        """
        if self.quantize_x == AUTO:
            is_asked = collector.layer.name in self.checkpoint.quantizing_x and not self.batch_invariant
            is_narrow = is_asked and eight.can_quantize_x(part.weight)
        elif is_narrow := bool(self.quantize_x):
            eight.check_quantize_x(part.weight)
        return replace(part, quantize_x=is_narrow, input_scale=collector.input_scale if is_narrow else None)

    def warn_of_experts(self, prefix: str, layers: Iterable[Layer]) -> None:
        """Log once that products of experts take x as it is, where settings or the checkpoint want it in 8 bits."""
        is_automatic = self.quantize_x == AUTO
        is_asked = any(layer.name in self.checkpoint.quantizing_x for layer in layers) if is_automatic else self.quantize_x
        if is_asked and not self.has_warned:
            self.has_warned = True
            logging.getLogger("qdsl").warning("%s: products of packed experts take x as it is; quantize_x is for linear layers",
                                              prefix)

    def parts(self, prefix: str, module: nn.Module) -> list[Layer]:
        """The layers of the checkpoint that a module consists of, [] where all are plain.  Raises ShardError."""
        layers = {**self.plain, **self.layers}
        stem, _, last = prefix.rpartition(".")
        names = [prefix] if prefix in layers else [              # some models do not state them, or, as Qwen3-MoE, too late
            f"{stem}.{part}".lstrip(".") for part in self.packed_modules_mapping.get(last) or MERGED.get(last, ())]
        self.modules |= {layers[name].name: module for name in names if name in layers}
        if not any(name in self.layers for name in names):
            return []
        if missing := [name for name in names if name not in layers]:
            raise ShardError(f"{prefix}: the checkpoint has some of {', '.join(names)} packed, and lacks {', '.join(missing)}")
        self.served.update(names)
        return [layers[name] for name in names]

    def check_place(self, name: str, tensor: Tensor) -> None:
        """Refuse a bias of a module that has none, which engines leave out; a bias of zeros changes nothing.

        Raises CheckpointError, unless `allow_unknown`.  name: of a tensor in the checkpoint.
        """
        owner, _, leaf = name.rpartition(".")
        module = self.modules.get(owner)
        if module is None or leaf != "bias" or getattr(module, leaf, None) is not None or not tensor.any():
            return
        what = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        finding = Finding(Kind.UNKNOWN, "", name, what, UNKNOWN_EFFECT)
        for text in refuse_changes(self.checkpoint.path, [finding], self.allow_unknown):
            logging.getLogger("qdsl").warning("%s: not computed: %s", self.checkpoint.path, text)


def register_counters(layer: nn.Module, collectors: Sequence[Collector], load: Callable[..., Any], stem: str = "") -> None:
    """Register a parameter for every tensor name that vLLM's loader brings for a module; `load` takes the tensors.

    The parameter has one element for each tensor, so that the loader counts them; weights are registered once all have come.
    """
    counts: Counter[str] = Counter()
    dtypes: dict[str, torch.dtype] = {}                          # vLLM warns of others
    for collector in collectors:
        counts.update((*collector.storage_names, *collector.unused))
        dtypes |= {leaf: collector.dtype(leaf) for leaf in collector.storage_names}
    for leaf, count in counts.items():
        places = torch.zeros(count, dtype=dtypes.get(leaf, torch.uint8), device=torch.get_default_device())    # that of vLLM
        counter = nn.Parameter(places, requires_grad=False)
        counter.leaf, counter.weight_loader = leaf, load         # type: ignore[attr-defined]
        layer.register_parameter(stem + leaf.replace(".", "_"), counter)


def take(collector: Collector, counter: nn.Parameter, tensor: Tensor) -> bool:
    """Pass a tensor of the checkpoint to a collector; returns whether it was the last one of its layer."""
    mark = counter.data[:1]
    mark.copy_(mark.clone())                                     # when vLLM reloads weights, it counts what is copied
    leaf = counter.leaf                                          # type: ignore[attr-defined]
    if counter.is_meta:
        return False
    collector.take(leaf, tensor)
    return collector.is_complete and leaf in collector.storage_names


def remove_counters(layer: nn.Module) -> torch.device | None:
    """Remove the counting parameters; returns their device, None where there are none."""
    device = None
    for name, param in list(layer.named_parameters(recurse=False)):
        if hasattr(param, "leaf"):
            device = param.device
            delattr(layer, name)
    return device


class PackedLinear:
    """A linear layer, an embedding or a head that consists of the rows of one or more packed layers.

    The packed tensors are parameters of the module, so that the engine can move, count and reload them.
    """

    def __init__(self, config: EngineConfig, layers: Sequence[Layer]) -> None:
        self.config = config
        self.layers = list(layers)
        self.collectors: list[Collector] = []
        self.loaded: dict[int, list[RankPart]] = {}
        self.places: list[int] = []                              # the collector of every part of the module
        self.parts: list[RankPart] = []

    def create_weights(self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
                       output_size: int, params_dtype: torch.dtype, **extra: Any) -> None:
        """Plan the rank's part.  Raises ShardError, before anything is loaded."""
        self.rows, self.dtype = sum(output_partition_sizes), params_dtype
        pieces = self._pieces(layer, input_size_per_partition, output_partition_sizes, input_size) if self.layers else []
        self.collectors = [self.config.collector(own, [piece for piece in pieces if piece.layer is own]) for own in self.layers]
        self.places = [self.layers.index(own.layer) for own in pieces]
        register_counters(layer, self.collectors, self.load)

    def ranks(self, layer: Any) -> tuple[int, int]:
        """The number of ranks that share a module, and the number of this one."""
        return layer.tp_size, layer.tp_rank

    def _pieces(self, layer: Any, columns: int, rows: Sequence[int], all_columns: int) -> list[RankPiece]:
        """The rank's pieces.  columns, rows: of the rank, rows by part.  Raises ShardError."""
        name = getattr(layer, "prefix", self.layers[0].name)
        first, vocabulary = self.layers[0], getattr(layer, "shard_indices", None)
        for own in self.layers:
            if not why_unservable(own) and own.shape[1] != all_columns:
                raise ShardError(f"{name}: {own.name} has {own.shape[1]} columns, and the model {all_columns}")
        if vocabulary is not None:
            start, stop = vocabulary.org_vocab_start_index, vocabulary.org_vocab_end_index
            return [piece(name, first, "N", start, stop, layer.tp_size)]
        if columns != all_columns:
            return [row_piece(name, first, *self.ranks(layer))]
        whole = [own.shape[0] for own in self.layers] if len(rows) == len(self.layers) else _rows(layer)
        return merged_pieces(name, self.layers, list(zip(rows, whole, strict=True)), *self.ranks(layer))

    def load(self, param: nn.Parameter, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
        """Take a tensor of the checkpoint; with the last one of a layer, the rank's part is cut out and the tensors are dropped.
        """
        shard = loaded_shard_id[0] if isinstance(loaded_shard_id, tuple) else loaded_shard_id
        number = self.places[HEADS.get(shard, shard) or 0]
        if take(self.collectors[number], param, loaded_weight):
            self.loaded[number] = self.collectors[number].parts(param.device)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Register the rank's weights; zeros for a model loaded without weights.  Raises ShardError for missing tensors."""
        device = remove_counters(layer)
        if device is None:
            return
        if not self.loaded and not any(collector.has_begun for collector in self.collectors):
            self.loaded = {number: collector.zeros(device) for number, collector in enumerate(self.collectors)}
        for number, collector in enumerate(self.collectors):
            if number not in self.loaded:
                self.loaded[number] = collector.parts(device)    # says what is missing
        self.parts = join_parts([self.config.quantizing_x(part, self.collectors[number]) for number in sorted(self.loaded)
                                 for part in self.loaded[number]])
        if not hasattr(layer, "shard_indices"):                  # an embedding looks rows up
            self.parts = [replace(part, weight=fastest_storage(part.weight, part.quantize_x)) for part in self.parts]
        self.loaded = {}
        for number, part in enumerate(self.parts):
            for name, tensor in part.weight.tensors.items():
                layer.register_parameter(f"qdsl_{number}_{name}", nn.Parameter(tensor, requires_grad=False))

    def current(self, layer: Any) -> list[RankPart]:
        """The parts, with the tensors that the module has now."""
        return [replace(part, weight=part.weight.derive({name: getattr(layer, f"qdsl_{number}_{name}")
                                                         for name in part.weight.tensors}))
                for number, part in enumerate(self.parts)]

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The matmul of x with the rank's weight, as wide as vLLM expects; rows of a padded vocabulary give zeros."""
        product = linear(x, self.current(layer), self.config.batch_invariant)
        missing = self.rows - product.shape[-1]
        if missing:
            product = nn.functional.pad(product, (0, missing))
        return product if bias is None else product + bias

    def dequantize_weight(self, layer: Any) -> Tensor:
        """The rank's dense weight, for vLLM to quantize again."""
        return torch.cat([part.dequantize(self.dtype) for part in self.current(layer)])

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """The rows of the weight with the numbers `input_`."""
        part, = self.current(layer)
        if part.weight.shape[0] == 0:                            # a rank without rows of the vocabulary
            return torch.zeros(*input_.shape, part.weight.shape[1], dtype=self.dtype, device=input_.device)
        rows: Tensor = part.weight.format.dequantize_rows(part.weight, input_ + part.span.padding[0], self.dtype)
        return rows

    def tie_weights(self, layer: Any, embed_tokens: nn.Module) -> nn.Module:
        """The embedding itself, which also serves as the head."""
        return embed_tokens


def _rows(layer: Any) -> list[int]:
    """The rows of each part of a merged layer, of all ranks."""
    if hasattr(layer, "total_num_kv_heads"):
        return [layer.total_num_heads * layer.head_size, layer.total_num_kv_heads * layer.head_size,
                layer.total_num_kv_heads * layer.v_head_size]
    return list(getattr(layer, "output_sizes", [layer.output_size]))
