"""vLLM's quantization config `qdsl`: which layers of a checkpoint are packed, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm.envs as envs
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from qdsl.checkpoint.descriptions import descriptions
from qdsl.checkpoint.detect import OWN
from qdsl.checkpoint.ignored import SKIPPED, is_skipped
from qdsl.checkpoint.layers import Layer
from qdsl.checkpoint.references import local_path
from qdsl.checkpoint.shards import Piece, ShardError, is_plain
from qdsl.models.served import Served, gguf_path, open_gguf
from qdsl.models.shards import Collector, Part
from qdsl.runtime import eight

if TYPE_CHECKING:
    from torch import nn
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.models.utils import WeightsMapper

OWN_KEYS = ("quant_method", "method", "format", "ignore", "quantize_x", "gguf_model")
AUTO = "auto"                                                    # of quantize_x: where the checkpoint states it
LOSSLESS = "hlane"                                              # of weights that files code together


class QdslConfig(QuantizationConfig):
    """Serves packed checkpoints of any producer, and quantizes plain ones on the way.

    A folder whose config names `quant_method: qdsl` is served without an option, all others with `--quantization qdsl`.
    settings: the config's `quantization_config`.  Of those of qdsl, `format` and its options say in what plain Linear layers are
    quantized, `ignore` which stay plain, by patterns, `quantize_x` that products take x in 8 bits, and `gguf_model` names a GGUF
    file.

    layers: the packed layers by the names that vLLM has for their modules, those to be encoded among them.  plain: matrices of
    numbers, which may be parts of a layer whose other parts are packed.  served: the names of layers that modules have asked for.
    encoded: layers that are plain in the checkpoint, by its names for them, and packed once they are loaded.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        own = dict(settings or {})
        own = own if OWN in (own.get("quant_method"), own.get("method")) else {}
        self.format: str | None = own.get("format")
        self.ignore = tuple(own.get("ignore", ()))
        self.quantize_x: bool | str = own.get("quantize_x", False)
        self.gguf_model: str | None = own.get("gguf_model")
        self.options = {key: value for key, value in own.items() if key not in OWN_KEYS}
        self.checkpoint = Served()
        self.layers: dict[str, Layer] = {}
        self.plain: dict[str, Layer] = {}
        self.served: set[str] = set()
        self.encoded: set[str] = set()
        self.has_packed_embedding = False

    def get_name(self) -> str:
        return OWN

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QdslConfig:
        return cls(config)

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None,
                                     ) -> str | None:
        """'qdsl' for a folder of qdsl, and for one of any producer where the user asks for it."""
        return OWN if user_quant == OWN or hf_quant_cfg.get("quant_method") == OWN else None

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Tensors of a weight, as bitsandbytes names them, as tensors of its module; vLLM's own mapper drops every `g_idx`.

        Layers that no module asks for are decoded.
        """
        from qdsl.models.vllm.weights import AssemblingMapper

        # A stack's gate and up come as one layer, for which vLLM's loader of experts has no name of its own.
        names = {re.compile(r"(\.experts\.\d+)\.gate_up_proj\."): r"\1.gate_proj.",
                 re.compile(r"\.weight\.(\w+)\."): r".weight_\1_", re.compile(r"\.weight\."): ".weight_"}
        return AssemblingMapper(orig_to_new_regex=names, config=self)

    def unserved(self) -> list[Layer]:
        """The packed layers that no module has asked for, once the model is built."""
        return [layer for name, layer in self.layers.items() if name not in self.served and layer.name not in self.encoded]

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read headers, of a repository once it is downloaded.  Raises CheckpointError, LoadError for a GGUF file of others."""
        self.checkpoint = self.read(model_name, hf_config, revision)
        self.layers, self.plain = self.checkpoint.packed, self.checkpoint.plain
        if not self.layers:
            if self.format not in [format.name for format in descriptions()]:
                raise ShardError(f"{model_name} has no packed layers, and {self.format!r} is no format to quantize them in; name "
                                 'one as "format" of the quantization_config')
            skipped = (*self.ignore, *SKIPPED, "experts")
            self.layers = {name: layer for name, layer in self.plain.items() if not is_skipped(name, skipped)}
        self.encoded = {name for name, layer in self.layers.items() if is_plain(layer)}

    def read(self, model_name: str, hf_config: Any, revision: str | None) -> Served:
        """The layers of a model's folder, repository or GGUF file."""
        if gguf := gguf_path(model_name, self.gguf_model):
            with closing(open_gguf(gguf, hf_config)) as source:
                return Served.of_gguf(source)
        is_remote = revision is not None and not Path(model_name).exists()
        return Served.of_folder(local_path(f"{model_name}@{revision}" if is_remote else model_name))

    def collector(self, layer: Layer, pieces: Sequence[Piece]) -> Collector:
        """What takes the tensors of a layer; one of plain numbers that is to be packed is encoded."""
        if layer.name not in self.encoded:
            return Collector(layer, pieces)
        module = import_module(f"qdsl.generated.{self.format or LOSSLESS}")
        return Collector(layer, pieces, partial(module.quantize, **self.options))

    def narrowed(self, part: Part, collector: Collector) -> Part:
        """A part whose products take x in 8 bits: where settings say so, FormatError if its weight has no rows of 8 bits; with
        'auto' where the checkpoint does."""
        if self.quantize_x == AUTO:
            is_asked = collector.layer.name in self.checkpoint.narrow and not envs.VLLM_BATCH_INVARIANT
            is_narrow = is_asked and eight.is_possible(part.weight)
        elif is_narrow := bool(self.quantize_x):
            eight.check(part.weight)
        return replace(part, quantize_x=is_narrow, input_scale=collector.input_scale if is_narrow else None)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Call layers as vLLM calls their modules."""
        self.layers = {hf_to_vllm_mapper.map_name(name) or name: layer for name, layer in self.layers.items()}
        self.plain = {hf_to_vllm_mapper.map_name(name) or name: layer for name, layer in self.plain.items()}

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method that serves a module; None for vLLM's own.  Raises ShardError for one that cannot be served."""
        from qdsl.models.vllm.methods import method_of

        return method_of(self, layer, prefix)
