"""Loads language models of GGUF files into transformers, with their weights packed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from qdsl.checkpoint.checkpoint import Checkpoint
from qdsl.checkpoint.detect.gguf_keys import plain, table
from qdsl.checkpoint.files import checksums, components
from qdsl.checkpoint.files.ggml_types import TORCH
from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.checkpoint.files.references import Repository, available, local_path, parse_reference
from qdsl.checkpoint.files.safetensors import shown
from qdsl.models.gguf_keys import contradictions, unknown_keys, unused_keys, wrong_types
from qdsl.models.gguf_maps import GgufMap, map_of, model_types
from qdsl.models.llama_vocabulary import Vocabulary, read_vocabulary
from qdsl.models.mapped_source import gguf_source, is_input_scale
from qdsl.models.plan import LoadError
from qdsl.models.processor import chosen_dtype
from qdsl.models.transformers.config import QdslConfig, Weights
from qdsl.models.transformers.gguf_config import (
    DEFAULTS,
    HEADS,
    KV_HEADS,
    config_of_file,
    is_tied,
    left_out,
    model_type_of,
    with_additions,
)
from qdsl.models.transformers.gguf_rope import computed_widths, rotary_contradictions
from qdsl.models.transformers.gguf_tokenizer import gguf_tokenizer

EMBEDDING = "token_embd.weight"
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")        # files of a folder that has one


def load_gguf(path: Path, *args: Any, base: str | Path | None = None, model_class: Any = None,
              quantization_config: QdslConfig | None = None, config: Any = None,
              **kwargs: Any) -> Any:
    """A model of transformers with the packed weights of a GGUF file; `from_pretrained` explains the arguments."""
    options = quantization_config or QdslConfig()
    if options.format is not None:
        raise LoadError(f"{path}: a GGUF file keeps its formats: load it without a format")
    if options.verify:
        checksums.check(path, is_optional=True)
    with GgufFile(path) as file:
        architecture = _architecture(file)
        is_read = base is None and config is None
        config = config_of(file, base) if config is None else config
        own = map_of(config.model_type, architecture)
        unused = unused_keys(file.metadata, own, bool(getattr(config, "rope_parameters", None))) if is_read else []
        allowed = _check_metadata(config, file, own, options.allow_unknown, is_read, {*unused})
        own = with_additions(own, config, file, is_read)
        if EMBEDDING in file.tensors:                            # without rows of padding, for some model types
            config.vocab_size = file.tensors[EMBEDDING].logical_shape[0]
        if is_tied(file, own):
            config.tie_word_embeddings = True                    # as llama.cpp does, whatever a base says
        dtype, why = chosen_dtype(_file_dtype(file), kwargs.get("device_map"))
        vocabulary = _vocabulary(file, path)
        scales = [name for name in file.tensors if is_input_scale(name, file.tensors) or left_out(name, file, own)]
        sampling = {name: value for key, name in SAMPLING.items()
                    if (value := file.metadata.get(f"general.sampling.{key}")) is not None}
    config.architectures = [own.model_class]
    vars(config).pop("quantization_config", None)                # of the base's weights, which are not read
    weights = Weights(lambda model, _: Checkpoint(path, {"": gguf_source(path, own, model, model.config, is_read)}))
    if kwargs.get("dtype") in (None, "auto"):
        dtype, why = (config.dtype, "the config's") if config.dtype else (dtype, why)
        kwargs["dtype"] = dtype
    else:
        dtype, why = kwargs["dtype"], "as asked"
    model = (model_class or getattr(transformers, own.model_class)).from_pretrained(
        None, *args, config=config, state_dict=weights.state,
        quantization_config=options.with_weights(weights), **kwargs)
    model.hf_quantizer.report.allowed += allowed
    model.hf_quantizer.report.unused += scales
    model.hf_quantizer.report.as_llama_cpp += [f"{own.architecture}.{key}" for key in unused]
    weights.state.clear()
    model.hf_quantizer.report.dtype = f"{str(dtype).removeprefix('torch.')}, {why}"
    if base is not None:
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(base)
    elif sampling and model.can_generate():                      # of the original model's generation settings
        is_greedy = sampling.get("temperature") == 0
        model.generation_config.update(**({} if is_greedy else {**sampling, "do_sample": True}))
    if vocabulary is not None and model.can_generate():
        _set_end_tokens(model.generation_config, vocabulary, keeps=base is not None)
    return model


def _architecture(file: GgufFile) -> str:
    """The architecture of a file with a language model.  Raises LoadError for one of something else."""
    kind = str(file.metadata.get("general.type", "model"))
    if kind != "model":
        raise LoadError(f"{file.path}: general.type is {shown(kind)}, which is no model by itself")
    if not file.tensors:
        raise LoadError(f"{file.path}: a vocabulary alone, without weights")
    if "general.architecture" not in file.metadata:
        raise LoadError(f"{file.path}: has no general.architecture: it is not known of which model it is")
    architecture = str(file.metadata["general.architecture"])
    if problems := wrong_types(file.metadata.stored(), architecture):
        raise LoadError("\n".join([f"{file.path}: llama.cpp reads metadata of other types:", *(f"  {one}" for one in problems)]))
    return architecture


def _check_metadata(config: Any, file: GgufFile, own: GgufMap, allow_unknown: bool, is_read: bool, unused: set[str]) -> list[str]:
    """Sentences about metadata that nothing explains.  Raises LoadError for them unless allowed, and for contradictions.

    is_read: the config is the file's own, so that a contradiction is what its class cannot say.
    """
    unread = table()["unread"].get(own.architecture, ())         # which converters write beside what llama.cpp reads
    zeros = {key for key in (*DEFAULTS, "attention.scale", "attention.sliding_window", "attention.layer_norm_rms_epsilon")
             if file.metadata.get(f"{own.architecture}.{key}") == 0}
    zeros |= {key for key in ("attention.clamp_kqv",) if file.metadata.get(f"{own.architecture}.{key}", 1) <= 0}
    zeros |= {key for key in ("feed_forward_length", HEADS, KV_HEADS)         # of which the first layer's counts, or each its own
              if isinstance(value := plain(file.metadata.get(f"{own.architecture}.{key}")), list) and len({*value}) > 1}
    skip = unused | zeros | computed_widths(config, file, own.architecture) | {*unread} if is_read else set()
    problems = contradictions(config, file.metadata, own, skip)
    problems += [] if is_read else rotary_contradictions(config, file, own.architecture)
    if problems:
        why = f"the config of {own.model_class} has no place for what the file says" if is_read else \
            f"the file and the config of {own.model_class} contradict each other"
        raise LoadError("\n".join([f"{file.path}: {why}:", *(f"  {problem}" for problem in problems)]))
    problems = unknown_keys(config, file.metadata, own, skip)
    if problems and not allow_unknown:
        raise LoadError("\n".join([f"{file.path}: metadata is not understood; --allow-unknown, or allow_unknown=True, loads the "
                                   "file all the same:", *(f"  {problem}" for problem in problems)]))
    return problems


def _vocabulary(file: GgufFile, path: Path) -> Vocabulary | None:
    """The file's vocabulary; None where it has none, or one that is not supported: a model runs without."""
    with suppress(LoadError):
        return read_vocabulary(file.metadata, path)
    return None


def _set_end_tokens(generation: Any, vocabulary: Vocabulary, keeps: bool) -> None:
    """Let generation end at the tokens at which llama.cpp's ends.  keeps: end at those that are set, too."""
    own = generation.eos_token_id if keeps else None
    ends = {*vocabulary.ends, *([own] if isinstance(own, int) else own or ())}
    generation.eos_token_id = sorted(ends) or None
    if vocabulary.suppressed:
        generation.suppress_tokens = sorted({*vocabulary.suppressed, *((keeps and generation.suppress_tokens) or ())})


def config_of(file: GgufFile, base: str | Path | None = None) -> Any:
    """The config of a language model: that of `base`, else one of the file's metadata.

    Raises LoadError for a file of an architecture without a map.
    """
    if base is not None:
        config = AutoConfig.from_pretrained(base)
        return config if config.model_type in model_types() else config.get_text_config(decoder=True)
    architecture = str(file.metadata["general.architecture"])
    return config_of_file(file, map_of(model_type_of(file, architecture), architecture))


def file_dtype(path: Path) -> str:
    """The dtype of a file's products on every machine: that of its plain matrices, float32 for one with packed weights."""
    with GgufFile(path) as file:
        return _file_dtype(file) or "float32"


def _file_dtype(file: GgufFile) -> str | None:
    """The dtype of a model of plain weights, so that they stay mapped; None for one with packed weights."""
    matrices = {tensor.type.name for tensor in file.tensors.values() if len(tensor.logical_shape) > 1}
    if matrices - {"F32"} in ({"F16"}, {"BF16"}):
        return TORCH[(matrices - {"F32"}).pop()]                 # routers and such are float32 beside
    return "float32" if matrices <= {"F32", "F16", "BF16"} else None


def tokenizer(ref: str | Path, base: str | Path | None = None, **kwargs: Any) -> Any:
    """The tokenizer of a GGUF file: that of the folder `base`, else one of the file's vocabulary, with llama.cpp's tokens; of a
    folder its own, else `base`'s.

    Raises LoadError for a vocabulary that is not supported.
    """
    path = gguf_path(ref)
    if path is not None and base is None:
        return gguf_tokenizer(path, **kwargs)
    is_own = path is None and any(Path(ref, name).exists() for name in TOKENIZERS)
    return AutoTokenizer.from_pretrained(available(ref if base is None or is_own else base, **kwargs), **kwargs)


def gguf_path(ref: str | Path) -> Path | None:
    """The local path of a GGUF file, by its name or first bytes, downloaded if remote; of a folder its only one; else None."""
    target = parse_reference(ref)
    if isinstance(target, Repository) and target.file is None and target.quant is None:
        return None
    path = components.gguf(local_path(ref))
    return path if path is None else Path(available(path))
