"""A guard in config.json that stops loaders which would produce a model with random weights.

transformers reads `transformers_weights` as the file name of the weights.  If it is not a file name, it raises a ValueError that
ends with its value.  Without the field transformers warns of an unknown quantization, and loads our own storages as noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.detect.rules import OWN, at, is_same
from qdsl.core.producer import CONFIG_FILE

FIELD = "transformers_weights"
REPLACED = "replaced_transformers_weights"                       # keeps the value that the sentence replaced
READER = "Only the package qdsl-formats reads these weights"      # the start of the sentence, in every version
SENTENCE = (f"{READER}: `pip install .` in a clone of it, then `import qdsl.models.transformers` before `from_pretrained`, "
            "or fill a model with `qdsl.load_weights_(model, folder)`.")

CLASS = "_class_name"                                            # a key of diffusers' configs
# Objects of a config that are settings and not models.
SETTINGS = ("quantization_config", "compression_config", "dfloat11_config", "generation_config")
# Entries that name a model, or say how it is stored; every other entry describes it.
NAMES = (CLASS, "_diffusers_version", "_name_or_path", "architectures", "dtype", "model_type", "torch_dtype",
         "transformers_version", FIELD, REPLACED, *SETTINGS)
# A model states its number of layers; configs of parts, such as attn_config, do not, and some refuse unknown fields.
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth")


def with_guard(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config.json with the guard, so that only qdsl loads its model and models nested in it.

    A class of transformers may load a nested config by itself: Gemma3ForCausalLM reads only `text_config`.  A file name that the
    field held before is kept in `replaced_transformers_weights`.  Configs of diffusers get no guard: diffusers refuses unknown
    settings itself, and warns of unknown fields.
    """
    if CLASS in config:
        return dict(config)
    nested = {key: with_guard(value) if _is_model(key, value) else value for key, value in config.items()}
    if FIELD in nested and not is_guard(nested[FIELD]):
        nested[REPLACED] = nested[FIELD]
    return {**nested, FIELD: SENTENCE}


def without_guard(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config.json without the guards that `with_guard` added, at any depth; restores replaced file names."""
    plain = {key: without_guard(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    if is_guard(plain.get(FIELD)):
        if REPLACED in plain:
            plain[FIELD] = plain.pop(REPLACED)
        else:
            del plain[FIELD]
    return plain


def describes_model(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says more of its model than a name: the dfloat11 package writes its own settings alone."""
    return any(key not in NAMES for key in config)


def has_own_settings(config: Mapping[str, Any]) -> bool:
    """Whether quantization settings of a config.json, at its top or in a nested model, are settings that only qdsl reads."""
    return any(is_same(at(config, ".".join((*place.at, "quant_method"))), OWN) for place, _ in producers().places
               if place.file == CONFIG_FILE)


def is_guard(value: object) -> bool:
    """Whether a value of `transformers_weights` is the guard's sentence, of any version."""
    return isinstance(value, str) and value.startswith(READER)


def _is_model(key: str, value: object) -> bool:
    """Whether an object of a config describes a model: it has a type or a number of layers, or contains such a model."""
    if not isinstance(value, Mapping) or key in SETTINGS:
        return False
    if value.get("model_type"):
        return True
    return key.endswith("_config") and (any(count in value for count in LAYER_COUNTS) or
                                        any(_is_model(name, inner) for name, inner in value.items()))
