"""The quantization `qdsl` in vllm-omni: transformers of diffusion pipelines, from GGUF files and packed folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import wraps
from pathlib import Path
from typing import Any

import diffusers
from torch import Tensor, nn
from vllm_omni.diffusion.config import get_current_diffusion_config
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader
from vllm_omni.quantization import register_quantization_override
from vllm_omni.quantization.component_config import ComponentQuantizationConfig

from qdsl.checkpoint.detect.rules import OWN
from qdsl.checkpoint.detect.sources import GgufSource
from qdsl.checkpoint.files.references import local_path
from qdsl.models.base import check_described, stored_config
from qdsl.models.mapped_source import MappedSource
from qdsl.models.served import Served, source_tensors
from qdsl.models.single_file_names import mapped_source, model_on_meta
from qdsl.models.vllm.config import QdslConfig

TRANSFORMER = "transformer"                                      # the folder of a pipeline whose model is quantized


class DiffusionConfig(QdslConfig):
    """Serves the transformer of a pipeline packed: `{"method": "qdsl", "gguf_model": REF}`, or as in its folder.

    Of a configuration for single components, `{"transformer": {"method": "qdsl"}, "vae": null}`, it is one.
    """

    is_checkpoint_quantized = True                               # else CPU offload takes it for quantizing on the way

    def read(self, model_name: str, hf_config: Any, revision: str | None) -> Served:
        """The layers of a pipeline's transformer, under the names of diffusers."""
        self.folder = (Path(model_name) if Path(model_name).exists() else local_path(model_name)) / TRANSFORMER
        check_described(self.folder, stored_config(self.folder), "vllm-omni would serve its class with default sizes: put the "
                        "config.json there of the model that it was made of, and `dfloat11_config` into it")
        if self.gguf_model is None:
            return Served.of_folder(self.verified(self.folder))
        with closing(self._file()) as source:
            return Served.of_gguf(source)

    def _file(self) -> MappedSource:
        """The GGUF file under the names of diffusers.  Raises LoadError where it does not fill the class of the folder."""
        settings = json.loads((self.folder / "config.json").read_text())
        cls = getattr(diffusers, settings["_class_name"])
        source = GgufSource(self.verified(local_path(str(self.gguf_model))))
        return mapped_source(cls, model_on_meta(cls, settings, None), source, settings)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method that serves a module; None for vLLM's own."""
        if not self.is_planned:                                  # vllm-omni tells the components of a configuration no folder
            self.maybe_update_config(get_current_diffusion_config().model)
        return super().get_quant_method(layer, prefix)

    def weights(self, stored: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The transformer's tensors under the names of vllm-omni.  stored: those of its folder, read where there is no GGUF file.
        """
        if self.gguf_model is None:
            yield from self.assembled(stored)
            return
        with closing(self._file()) as source:
            yield from self.assembled(source_tensors(source))


def install() -> None:
    """Register the quantization; its weights replace those that vllm-omni's loader reads for a transformer."""
    register_quantization_override(OWN, lambda **settings: DiffusionConfig({"method": OWN, **settings}))
    DiffusersPipelineLoader._get_weights_iterator = _with_packed(DiffusersPipelineLoader._get_weights_iterator)
    ComponentQuantizationConfig.resolve = _by_layers(ComponentQuantizationConfig.resolve)


def _with_packed(read: Callable[..., Iterator[tuple[str, Tensor]]]) -> Callable[..., Iterator[tuple[str, Tensor]]]:
    """vllm-omni's function that reads a component's weights, extended to packed transformers."""
    @wraps(read)
    def weights(self: DiffusersPipelineLoader, source: Any, model: nn.Module | None = None) -> Iterator[tuple[str, Tensor]]:
        config = self._get_source_quant_config(source)
        if not isinstance(config, DiffusionConfig) or source.prefix != f"{TRANSFORMER}.":
            yield from read(self, source, model)
            return
        stored = () if config.gguf_model else (
            (name.removeprefix(source.prefix), tensor) for name, tensor in read(self, source, model))
        yield from ((source.prefix + name, tensor) for name, tensor in config.weights(stored))

    return weights


def _by_layers(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """vllm-omni's function that chooses a component's configuration, with the component's name removed from modules' names."""
    @wraps(resolve)
    def resolve_or_transformer(self: ComponentQuantizationConfig, prefix: str) -> Any:
        config = resolve(self, prefix)
        is_named = any(prefix.startswith(component) for component in self.component_configs)
        own = self.component_configs.get(TRANSFORMER)
        return own if config is None and not is_named and isinstance(own, DiffusionConfig) else config

    return resolve_or_transformer
