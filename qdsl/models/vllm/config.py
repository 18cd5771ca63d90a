"""vLLM's quantization config `qdsl`: which layers of a checkpoint are packed, and how."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader import register_model_loader

from qdsl.checkpoint.detect.rules import OWN
from qdsl.checkpoint.files.references import local_path
from qdsl.checkpoint.report.shards import STREAMED
from qdsl.models.engine import EngineConfig
from qdsl.models.served import Served, gguf_path, open_gguf
from qdsl.models.vllm.weights import AssemblingMapper, GgufLoader

if TYPE_CHECKING:
    from torch import nn
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.models.utils import WeightsMapper


class QdslConfig(EngineConfig, QuantizationConfig):
    """Serves packed checkpoints of any producer, and quantizes plain ones on the way."""

    @property
    def batch_invariant(self) -> bool:
        """Whether vLLM asks for batch invariance, by VLLM_BATCH_INVARIANT."""
        return bool(envs.VLLM_BATCH_INVARIANT)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """The mapper from a checkpoint's tensors to those of modules; vLLM's own drops every `g_idx`."""
        return AssemblingMapper(config=self)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read the headers of the model.  Raises CheckpointError, and LoadError for a GGUF file of another model."""
        self.plan(self.read(model_name, hf_config, revision))
        if getattr(hf_config, "model_type", "") == STREAMED:     # else its loader asks for tensors of MXFP4
            hf_config.quantization_config = {"quant_method": OWN}

    def read(self, model_name: str, hf_config: Any, revision: str | None) -> Served:
        """The layers of a model's folder, repository or GGUF file."""
        if gguf := gguf_path(model_name, self.gguf_model):
            with closing(open_gguf(self.verified(gguf), hf_config)) as source:
                return Served.of_gguf(source)
        is_remote = revision is not None and not Path(model_name).exists()
        return Served.of_folder(self.verified(local_path(f"{model_name}@{revision}" if is_remote else model_name)))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Rename layers as vLLM names their modules."""
        self.layers = {hf_to_vllm_mapper.map_name(name) or name: layer for name, layer in self.layers.items()}
        self.plain = {hf_to_vllm_mapper.map_name(name) or name: layer for name, layer in self.plain.items()}

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method that serves a module; None for vLLM's own.  Raises ShardError for one that cannot be served."""
        from qdsl.models.vllm.methods import method_of

        return method_of(self, layer, prefix)


def install() -> None:
    """Register the quantization and the load format."""
    register_quantization_config(OWN)(QdslConfig)
    register_model_loader(OWN)(GgufLoader)
