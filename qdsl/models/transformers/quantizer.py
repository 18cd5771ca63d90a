"""The quantizer plug-in for transformers: places packed layers in a model before the library loads plain tensors."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.quantizers import HfQuantizer

import qdsl.models.transformers.moe as moe
from qdsl.checkpoint.checkpoint import Checkpoint
from qdsl.checkpoint.detect.guard import FIELD, REPLACED, is_guard, without_guard
from qdsl.checkpoint.detect.ignored import SKIPPED
from qdsl.checkpoint.detect.ledger import refuse_changes
from qdsl.checkpoint.detect.rules import OWN
from qdsl.checkpoint.detect.sources import FolderSource, Source
from qdsl.checkpoint.files.folder import INDEX, Folder
from qdsl.checkpoint.files.references import available, local_path
from qdsl.checkpoint.files.safetensors import shown
from qdsl.jobs.engine.complete import ADAPTER
from qdsl.models.base import Base
from qdsl.models.conversions import Conversions, ignored, layer_shapes, missing_parameters, reverted
from qdsl.models.dense import embeddings, make_dense
from qdsl.models.experts import Experts
from qdsl.models.findings import unplaced_findings
from qdsl.models.load import fill_model, use_planar
from qdsl.models.load_report import LoadReport, bytes_by_device
from qdsl.models.names import Names
from qdsl.models.offloaded import onloaded
from qdsl.models.origin import Origin, origin_in
from qdsl.models.parameters import num_parameters
from qdsl.models.plan import LoadError, listed
from qdsl.models.plugin import check_format, move_to_map, open_files, single_device, without_disk
from qdsl.models.private_apis import float32_modules, mark_initialized, may_be_unexpected
from qdsl.models.save import save
from qdsl.models.stacks import packed_names, usual_stacks
from qdsl.models.ties import Ties, keep_ties, recorded_ties, renew_ties
from qdsl.models.transformers.config import QdslConfig
from qdsl.models.transformers.contract import sentence
from qdsl.models.transformers.folder import load_folder, named_class, needs_own_reading
from qdsl.models.transformers.gguf import gguf_path, load_gguf
from qdsl.models.transformers.gguf_additions import add_to_model, refuse_plain_save
from qdsl.runtime.torch.module import PackedModule

# What `AutoConfig.from_pretrained` takes of what a model's takes.
HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "trust_remote_code")


class QdslHfQuantizer(HfQuantizer):
    """Places a folder's packed layers in a model while `from_pretrained` loads it.

    report: which layers are packed, as of `qdsl.load_weights_`.  transformers loads all plain tensors by itself.  Weights on a
    CPU stay mapped from their files, so a `device_map` that names the disk keeps them there.
    """

    quantization_config: QdslConfig

    def __init__(self, quantization_config: QdslConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **{**kwargs, "pre_quantized": True})   # the files tell whether layers are packed
        self.report: LoadReport | None = None
        self._files: list[Path] = []
        self._device_map: Any = None
        self._ties: Ties = {}                                    # what the model would share if the files had it once
        self._initial_config = ""                                        # the config from which the model is built
        self._loaded: list[str] = []                             # the model's configs as they were loaded

    # -- before the model is built ------------------------------------------------------------------------------------

    def update_device_map(self, device_map: Any) -> Any:
        """The device map with the CPU in place of the disk."""
        self._device_map = without_disk(device_map)
        return self._device_map

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Replace the disk with the CPU in a map that transformers has inferred."""
        if isinstance(device_map, dict) and self.report is not None:
            device_map.update(self.update_device_map(device_map))

    def update_attn_implementation(self, config: Any) -> Any:
        """The config, unchanged; its text is recorded, to detect later whether the caller has edited it."""
        self._initial_config = config.to_json_string()
        return config

    # -- before weights are loaded ------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._files = [Path(file) for file in kwargs.get("checkpoint_files") or ()]
        adapters = [file.with_name(ADAPTER) for file in self._files if file.with_name(ADAPTER).is_file()]
        if adapters and find_spec("peft") is None and not self.quantization_config.allow_unknown:
            raise LoadError(f"{adapters[0]}: transformers adds this adapter to the model if peft is installed, and it is not; "
                            "allow_unknown=True leaves it out")
        add_to_model(model)
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """The library's conversions, unchanged; the first call places the packed layers."""
        weights = self.quantization_config.weights
        if self.report is None and weights is not None:
            names = weights.names(model, weight_conversions)
            with weights.open(model, names) as checkpoint:
                self._place(model, checkpoint, names)
                weights.state.update({name: checkpoint.source.tensor(name) for name in checkpoint.plain})
        elif self.report is None:
            with open_files(self._files, self.quantization_config.verify) as checkpoint:
                self._place(model, checkpoint, Conversions(model, weight_conversions))
        return weight_conversions

    def _place(self, model: Any, checkpoint: Checkpoint, names: Conversions | None) -> None:
        """Place packed layers in a model on meta, so that transformers does not load them.

        names: those of the model for those of the checkpoint; None where they are the same.
        """
        config, source = self.quantization_config, checkpoint.source
        if names is not None:
            check_format(checkpoint, config.format)
        skip = [*config.skip, *((*SKIPPED, *map(re.escape, float32_modules(model))) if config.format else ())]
        before, device = _tensors(model), single_device(self._device_map)
        packed = None if config.format else {*packed_names(source)}
        stacks = None if names is None else {**usual_stacks(dict(model.named_parameters()), source, names.place, config.format),
                                             **names.stacks(layer_shapes(source), packed)}
        self.report = fill_model(model, checkpoint, None if names is None else names.rename, device, skip=skip, plain=False,
                                 stacks=stacks, format=config.format, verify=config.verify, planar=False,
                                 match_dense=config.match_dense, allow_unknown=config.allow_unknown, **config.options)
        if config.format is not None and not self.report.packed:
            raise LoadError(f"{checkpoint.path}: no layer became {config.format}\n{self.report}")
        if config.format is not None:
            _report_converted(model, self.report)
        old = {id(tensor) for tensor in before.values()}
        after = _tensors(model)
        if names is not None:
            _check_codes(source, names, {name for name, tensor in after.items() if tensor.is_meta and id(tensor) in old})
        placed = {name for name, tensor in after.items() if id(tensor) not in old and not tensor.is_meta}
        for name in placed:
            mark_initialized(after[name])
        self._ties = recorded_ties(model)
        keep_ties(model, self._ties)
        hook = model.register_state_dict_post_hook(partial(_hide, placed))
        origin = origin_in(model)                                # its unused tensors are small ones of packed layers
        unused = {*self.report.unused, *source.plain} - (origin.unused.keys() if origin else set())
        if names is not None and isinstance(source, FolderSource):
            places = {full: target for full in {*self.report.unused, *source.plain}
                      if (target := names.target(full)[0]) not in names.tensors}
            unplaced = unplaced_findings(source, Names(model), places, model)
            self.report.allowed += refuse_changes(checkpoint.path, unplaced, config.allow_unknown)
        targets = set() if names is None else {names.target(full)[0] for full in unused} - names.tensors.keys()
        left = [name for name in sorted(targets) if source.groups and not ignored(name, config.skip)
                and not any(re.search(pattern, name) for pattern in may_be_unexpected(model))]
        if left:
            raise LoadError(f"{checkpoint.path}: {len(left)} tensors have no place in {type(model).__name__}: {listed(left)}; "
                            "name those to leave out in QdslConfig(skip=...)")
        model.mark_tied_weights_as_initialized = partial(self._finish_loading, model, hook, targets, placed)
        if any(isinstance(module, Experts) for module in model.modules()):
            model.set_experts_implementation(moe.NAME)

    def _finish_loading(self, model: Any, hook: Any, unexpected: set[str], placed: set[str], loading_info: Any) -> None:
        """Move packed tensors to their devices, after transformers has loaded all others.

        Raises LoadError for a parameter that would be left with the numbers of a new model.
        """
        hook.remove()
        del model.mark_tied_weights_as_initialized
        loading_info.unexpected_keys = unexpected                # the tensors of packed layers are not among them
        missing = missing_parameters(model, loading_info.missing_keys, self.quantization_config.skip)
        if missing:
            unused = self.report.unused if self.report else []
            hint = f"; the checkpoint has, and the model does not: {listed(unused)}" if unused else ""
            raise LoadError(f"{len(missing)} parameters of the model are not in the checkpoint: {listed(missing)}{hint}; "
                            "name those that transformers shall initialise in QdslConfig(skip=...)")
        for module in model.modules():                           # Youtu's class zeroes a row of an embedding that is loaded
            if type(module) is nn.Embedding and getattr(module.weight, "_is_hf_initialized", False):
                mark_initialized(module)
        if isinstance(self._device_map, Mapping):
            move_to_map(model, placed, self._device_map)
        config = self.quantization_config
        if self.report is not None and not (config.match_dense or "storage" in config.options):
            # A map of several devices may offload those on a CPU, which accelerate knows by the names that they have.
            is_mapped = isinstance(self._device_map, Mapping) and len(self._device_map) > 1
            for layer in use_planar(model, self.report, ("cuda", "xpu") if is_mapped else ()):
                for tensor in layer.parameters():
                    mark_initialized(tensor)
        model.mark_tied_weights_as_initialized(loading_info)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        origin = origin_in(model)
        if origin is None or self.report is None or "mark_tied_weights_as_initialized" in vars(model):
            raise RuntimeError(sentence("loads weights in another way"))
        origin.revert = reverted
        keep_ties(model, self._ties)
        self._loaded = _configs(model)
        if self._is_edited(model.config, origin):
            self._loaded[0] = ""
        self.report.device_bytes = bytes_by_device(model)             # of all weights
        self.report.bytes_after = sum(self.report.device_bytes.values())
        if not self.report.packed:
            refuse_plain_save(model)
        if any(isinstance(module, PackedModule) for module in embeddings(model)):
            model.resize_token_embeddings = _refuse_resize
        model.num_parameters = partial(num_parameters, model)
        return model

    def _is_edited(self, config: Any, origin: Origin) -> bool:
        """Whether the caller loaded the model with a config that differs from the folder's in more than the dtype."""
        stored = json.loads(origin.config or "{}")
        if stored.get("model_type") != config.model_type:        # a part of a composite model
            return False
        folder = type(config).from_dict(_with_floats(stored))
        _strip_settings(folder)
        return _settings(json.loads(folder.to_json_string())) != _settings(json.loads(self._initial_config))

    # -- what the model can do ----------------------------------------------------------------------------------------

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of plain tensors; bfloat16 where transformers chose the dtype of stored codes."""
        return dtype if dtype.itemsize > 1 else torch.bfloat16

    def save(self, model: Any, folder: Path) -> None:
        """Write the files that a model was loaded from, with its current configs."""
        now = _configs(model)
        with onloaded(model):
            save(model, folder, None if now[:1] == self._loaded[:1] else json.loads(now[0]))
        if now[1:] != self._loaded[1:] or (self.quantization_config.weights is not None and model.can_generate()):
            model.generation_config.save_pretrained(folder)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained: yes.  Packed weights cannot."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        make_dense(model, dtype)
        refuse_plain_save(model)
        for name in ("resize_token_embeddings", "num_parameters"):
            vars(model).pop(name, None)
        renew_ties(model)
        return model


def from_pretrained(ref: str | Path, *args: Any, model_class: Any = None, quantization_config: QdslConfig | None = None,
                    base: str | Path | None = None, fetch: Base | None = None, allow_unknown: bool = False, **kwargs: Any) -> Any:
    """Loads a GGUF file, or a folder or repository with packed weights of any producer, as a model of transformers.

    It takes what `from_pretrained` of a class takes, and also folders that transformers does not dispatch to a quantizer: DF11,
    ModelOpt, and those whose config states nothing.  model_class: by default that which the config names.

    A GGUF file, or the first of a split one, is a path, a URL, OWNER/NAME/FILE.gguf or OWNER/NAME:QUANT.  base: a folder or
    repository of the model that the weights were made of.  Its config is taken where `ref` has none that describes the model,
    its generation settings, and for a folder its plain tensors for parameters that have none.  allow_unknown: as of QdslConfig.
    """
    if allow_unknown:
        quantization_config = copy.copy(quantization_config or QdslConfig())
        quantization_config.allow_unknown = True
    hub = {key: kwargs[key] for key in HUB if key in kwargs}
    if base is not None:
        base = available(base)
    if (path := gguf_path(ref)) is not None:
        return load_gguf(path, *args, base=base, model_class=model_class, quantization_config=quantization_config, **kwargs)
    ref = available(ref, **hub)
    config = kwargs.pop("config", None)
    if base is not None or needs_own_reading(_config_dict(ref, hub)):
        others = {key: value for key, value in kwargs.items() if key not in HUB}
        return load_folder(_local_folder(ref, **hub), *args, base=base, fetch=fetch, model_class=model_class, config=config,
                           quantization_config=quantization_config, **others)
    if config is None:
        config = AutoConfig.from_pretrained(ref, **hub)
    if (Path(ref) / INDEX).is_file():                            # of which transformers takes much for granted
        Folder(ref).close()
    return (model_class or named_class(config)).from_pretrained(ref, *args, config=config,
                                                                quantization_config=quantization_config or QdslConfig(), **kwargs)


def _config_dict(ref: str | Path, hub: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json of a folder or repository holds; {} without one."""
    try:
        config: Mapping[str, Any] = PreTrainedConfig.get_config_dict(ref, **hub)[0]
    except OSError:
        return {}
    return config


def _local_folder(ref: str | Path, revision: str | None = None, subfolder: str = "", **hub: Any) -> Path:
    """The local path of a folder or of a file in one, downloaded if remote."""
    path = local_path(ref if revision is None or Path(ref).exists() else f"{ref}@{revision}")
    return path / subfolder if subfolder else path


def handed_over(config: Any, quantization_config: Any) -> Any:
    """The quantization_config to pass to `from_pretrained`; a QdslConfig for folders that only qdsl reads.

    config: of the model.  For a QdslConfig this removes every producer's quantization settings from it, and the text by which
    other loaders refuse the folder.  Raises ValueError for tensor parallelism.
    """
    stored = [getattr(holder, "quantization_config", None) for holder in (config, config.get_text_config(decoder=True))]
    settings = next((dict(own) for own in stored if own is not None), None)
    is_own = is_guard(getattr(config, FIELD, None)) or (settings is not None and settings.get("quant_method") == OWN)
    if isinstance(quantization_config, dict) and quantization_config.get("quant_method") == OWN:
        quantization_config = QdslConfig(**quantization_config)
    if quantization_config is None and is_own:
        quantization_config = QdslConfig()
    if not isinstance(quantization_config, QdslConfig):
        return quantization_config
    if getattr(config, "distributed_config", None) is not None:
        raise ValueError("tp_plan: transformers shards plain weights alone, no packed ones; use device_map=")
    _strip_settings(config)
    return quantization_config if settings is None else quantization_config.with_settings(settings)


def _configs(model: Any) -> list[str]:
    """The JSON texts of a model's config and, if it generates text, of its generation config."""
    return [model.config.to_json_string(), *([model.generation_config.to_json_string()] if model.can_generate() else [])]


def _refuse_resize(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("resize_token_embeddings: embeddings or the head are packed; load the model with "
                     "quantization_config=QdslConfig(skip=['embed_tokens', 'lm_head']), which makes them dense, then resize")


def _report_converted(model: nn.Module, report: LoadReport) -> None:
    """Report matrices that stay dense because transformers joins them from several tensors."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta and parameter.dim() > 1 and not {name, name.removesuffix(".weight")} & report.dense.keys():
            report.dense[name] = "transformers makes it of other tensors of the checkpoint"


def _check_codes(source: Source, names: Conversions, empty: set[str]) -> None:
    """Raises LoadError where transformers would load the codes of a packed layer as a plain parameter."""
    codes = [f"{shown(full)} of {target}{f': {layer.why}' if layer.why else ''}" for layer in source.layers.values()
             for full in (*layer.tensors.values(), *(layer.others.values() if layer.why else ()))
             if (target := names.target(full)[0]) in empty]
    if codes:
        raise LoadError(f"{source.path}: transformers makes parameters of these tensors, and cannot of packed ones: "
                        f"{listed(codes)}")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _hide(names: Iterable[str], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Leave tensors out of a state_dict, so that transformers does not look for them in the checkpoint."""
    for name in names:
        state.pop(prefix + name, None)


def _with_floats(value: Any) -> Any:
    """A part of a config.json with numbers in place of {"__float__": "Infinity"}, as transformers 5 writes what JSON lacks."""
    if isinstance(value, dict):
        is_float = [*value] == ["__float__"]
        return float(value["__float__"]) if is_float else {key: _with_floats(own) for key, own in value.items()}
    return [_with_floats(own) for own in value] if isinstance(value, list) else value


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """The entries of a config, nested ones too, without dtypes and quantization settings."""
    return {name: _settings(value) if isinstance(value, dict) else value for name, value in config.items()
            if name not in ("dtype", "quantization_config")}


def _strip_settings(config: Any) -> None:
    """Remove quantization settings, and qdsl's guard against other loaders, from a config and its nested configs."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _strip_settings(value)
        elif isinstance(value, dict):
            vars(config)[name] = without_guard(value)
    vars(config).pop("quantization_config", None)
    if is_guard(getattr(config, FIELD, None)):
        replaced = vars(config).pop(REPLACED, None)
        delattr(config, FIELD) if replaced is None else setattr(config, FIELD, replaced)
