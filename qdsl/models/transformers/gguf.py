"""Language models of GGUF files in transformers, with their weights packed."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from qdsl.checkpoint.gguf import GgufFile
from qdsl.checkpoint.gguf_metadata import Value
from qdsl.checkpoint.gguf_write import NewTensor
from qdsl.checkpoint.gguf_write import write as write_gguf
from qdsl.checkpoint.ggml_types import BY_NAME
from qdsl.models.gguf_maps import map_of, model_types
from qdsl.models.plan import LoadError
from qdsl.models.transformers.config import QdslConfig
from qdsl.models.transformers.gguf_weights import GgufWeights

EMBEDDING = "token_embd.weight"
# Numbers that transformers does not read, or reads wrongly: a key after the architecture -> the attribute of a config.
CORRECTED = {"expert_feed_forward_length": "moe_intermediate_size",
             "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}


def load_gguf(path: Path, *args: Any, base: str | Path | None = None, model_class: Any = None,
              quantization_config: QdslConfig | None = None, config: Any = None, **kwargs: Any) -> Any:
    """A model of transformers with the packed weights of a GGUF file; `from_pretrained` explains the arguments."""
    options = quantization_config or QdslConfig()
    if options.format is not None:
        raise LoadError(f"{path}: a GGUF file keeps its formats: load it without a format")
    with GgufFile(path) as file:
        architecture = str(file.metadata["general.architecture"])
        config = config_of(file, path, base) if config is None else config
        if EMBEDDING in file.tensors:
            config.vocab_size = file.tensors[EMBEDDING].logical_shape[0]
    own = map_of(config.model_type, architecture)
    config.architectures = [own.model_class]
    vars(config).pop("quantization_config", None)                # of the base's weights, which are not read
    weights = GgufWeights(path, own)
    kwargs.setdefault("dtype", config.dtype or "float32")
    model = (model_class or getattr(transformers, own.model_class)).from_pretrained(
        None, *args, config=config, state_dict=weights.state,
        quantization_config=QdslConfig(ignore=options.ignore, gguf=weights), **kwargs)
    weights.state.clear()
    if base is not None:
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(base)
    return model


def config_of(file: GgufFile, path: Path, base: str | Path | None = None) -> Any:
    """The config of a language model: that of `base`, else what transformers reads from the file.

    Raises LoadError for a file of which it reads no config.
    """
    if base is not None:
        config = AutoConfig.from_pretrained(base)
        return config if config.model_type in model_types() else config.get_text_config(decoder=True)
    architecture = str(file.metadata["general.architecture"])
    with tempfile.TemporaryDirectory() as folder:
        _write_header(file, Path(folder) / "header.gguf", architecture)
        try:
            config = AutoConfig.from_pretrained(folder, gguf_file="header.gguf")
        except (ValueError, KeyError) as error:
            raise LoadError(f"{path}: transformers reads no config of architecture {architecture!r} from GGUF files: "
                            f"pass base=, a folder with config.json ({error})") from error
    for key, attribute in CORRECTED.items():
        value = file.metadata.get(f"{architecture}.{key}")
        if value is not None and hasattr(config, attribute):
            setattr(config, attribute, value)
    return config


def tokenizer(ref: str | Path, base: str | Path | None = None, **kwargs: Any) -> Any:
    """The tokenizer of a GGUF file: that of the folder `base`, else what transformers makes of the file's vocabulary."""
    if base is not None:
        return AutoTokenizer.from_pretrained(base, **kwargs)
    path = Path(ref)
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **kwargs)


def _write_header(file: GgufFile, path: Path, architecture: str) -> None:
    """Write a GGUF file of the same settings, without the vocabulary, which takes transformers seconds to read."""
    metadata = {key: value for key, value in file.metadata.stored().items()
                if not (key.startswith("tokenizer.") and value.type.endswith("[]"))}
    if EMBEDDING in file.tensors:
        metadata.setdefault(f"{architecture}.vocab_size", Value.of("u32", file.tensors[EMBEDDING].logical_shape[0]))
    write_gguf(path, metadata, [NewTensor(name, BY_NAME["F32"], (1,), [bytes(4)]) for name in file.tensors])
