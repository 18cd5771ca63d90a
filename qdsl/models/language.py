"""Loads language models with their tokenizers by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers

import qdsl.models.transformers as plugin
from qdsl.checkpoint.checkpoint import open_checkpoint
from qdsl.checkpoint.files.components import why_no_config, why_no_model
from qdsl.checkpoint.files.references import local_path, path_hint
from qdsl.models.plan import LoadError
from qdsl.models.plugin import usable_device
from qdsl.models.transformers.gguf import file_dtype, gguf_path
from qdsl.runtime.torch.module import PackedModule

CLEAR = (ValueError, OSError, ImportError, MemoryError)          # CheckpointError and FormatError, too
NO_TOKENIZER = ("{}: has no tokenizer, and its prompt would be lost: copy the model's tokenizer files into it, or name a base "
                "that has them")


@contextmanager
def named_errors(what: str, *passed: type[Exception]) -> Iterator[None]:
    """Turns errors of transformers, of many kinds by what is wrong, into LoadError.  passed: errors that say enough."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (LoadError, *passed)):
            raise
        raise LoadError(f"{what}: {error}") from error


@dataclass
class LanguageModel:
    """A model of transformers.  name: as the user named it.  path: its folder, repository or file.  seconds: of loading.

    base: the model that its weights were made of, with what its folder lacks.
    """

    name: str
    path: str
    model: Any
    seconds: float
    base: str | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer, loaded on first use."""
        is_folder = self.base is None and Path(self.path).is_dir()
        if is_folder and not any(any(Path(self.path).glob(name)) for name in ("*token*", "vocab*", "*.model")):
            raise LoadError(NO_TOKENIZER.format(self.path))
        with named_errors(f"{self.path}: transformers reads no tokenizer from it"):
            tokenizer = plugin.tokenizer(self.path, self.base)
        if tokenizer.get_vocab().keys() <= {*tokenizer.all_special_tokens}:          # what transformers makes of no files
            raise LoadError(NO_TOKENIZER.format(self.path))
        return tokenizer

    @property
    def allowed(self) -> list[str]:
        """What its checkpoint says that is not computed, which `allow_unknown` let pass."""
        report = getattr(getattr(self.model, "hf_quantizer", None), "report", None)
        return [] if report is None else list(report.allowed)

    @property
    def packed_layers(self) -> int:
        report = getattr(getattr(self.model, "hf_quantizer", None), "report", None)
        return 0 if report is None else len(report.packed)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of all parameters per number; plain numbers count in the dtype of the files."""
        report = getattr(getattr(self.model, "hf_quantizer", None), "report", None)
        dtype = self.model.dtype
        is_gguf, described = gguf_path(self.path) is not None, self.base or self.path
        plain = dtype if is_gguf else transformers.AutoConfig.from_pretrained(described).dtype or dtype
        packed = {tensor.data_ptr() for module in self.model.modules() if isinstance(module, PackedModule)
                  for tensor in module.parameters()}
        stored = sum({tensor.data_ptr(): tensor.nbytes if tensor.data_ptr() in packed else tensor.numel() * plain.itemsize
                      for tensor in self.model.parameters()}.values())
        numbers = sum({tensor.data_ptr(): tensor.numel() for tensor in self.model.parameters()}.values()) if report is None \
            else report.bytes_before // dtype.itemsize
        return float(8 * stored / numbers)


def load_language_model(ref: str, format: str | None = None, device: str | None = None, dtype: str = "auto",
                        params: Mapping[str, Any] | None = None, match_dense: bool = False,
                        base: str | None = None, allow_unknown: bool = False,
                        check: Callable[[LanguageModel], object] | None = None) -> LanguageModel:
    """Load a folder, a repository or a GGUF file: packed weights as they are, plain ones plain or quantized in a format.

    device: by default a GPU where there is one.  params: of the format's quantizer.  match_dense, allow_unknown: as of
    `QdslConfig`.  base: the model that packed weights were made of, for what a folder or a GGUF file lacks.  check: is called
    before weights are loaded, with what has a tokenizer and no model yet, to raise what the tokenizer alone can tell.

    Raises LoadError, CheckpointError, OSError.
    """
    transformers.utils.logging.disable_progress_bar()
    began = time.perf_counter()
    path = local_path(ref)
    path = gguf_path(path) or path
    if not path.exists():
        raise LoadError(f"{ref}: no such folder or file{path_hint(path)}")
    if why := why_no_model(path):
        raise LoadError(f"{ref}: {why}")
    if base is None and (why := why_no_config(path)):
        raise LoadError(f"{ref}: {why}")
    options: dict[str, Any] = {"dtype": dtype, "device_map": usable_device(device)}
    wanted = " ".join([format, *(f"{key}={value}" for key, value in (params or {}).items())]) if format else ""
    language = LanguageModel(f"{ref} as {wanted}" if wanted else ref, str(path), None, 0.0, base)
    if check is not None:
        check(language)
    is_gguf = gguf_path(path) is not None
    if is_gguf or base is not None or format is not None or _is_packed(path):
        config = plugin.QdslConfig(format, match_dense=match_dense, allow_unknown=allow_unknown, **(params or {}))
        with named_errors(f"{path}: transformers does not load it", *CLEAR):
            language.model = plugin.from_pretrained(path, base=base, quantization_config=config, **options)
    else:
        language.model = _load_plain(path, options)
    language.seconds = time.perf_counter() - began
    return language


def portable_dtype(ref: str, dtype: str) -> str:
    """A dtype for `load_language_model` that is the same on every machine: `auto` of a GGUF file depends on the processor."""
    path = gguf_path(ref) if dtype == "auto" else None
    return dtype if path is None else file_dtype(path)


def _load_plain(path: Path, options: Mapping[str, Any]) -> Any:
    """Load a plain folder with transformers.  Raises LoadError where transformers would initialise a weight at random."""
    with named_errors(f"{path}: transformers does not load it"):
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    if missing := sorted(loading["missing_keys"]):
        raise LoadError(f"{path}: no tensor for {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
    return model


def _is_packed(path: Path) -> bool:
    """Whether a folder has packed weights; of a repository only the config is read, by transformers."""
    if not path.exists():
        return getattr(transformers.AutoConfig.from_pretrained(str(path)), "quantization_config", None) is not None
    with open_checkpoint(path) as checkpoint:
        return bool(checkpoint.layers or checkpoint.groups)
