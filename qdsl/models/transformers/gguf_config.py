"""Configs of transformers from the metadata and tensors of GGUF files, by the table of qdsl.checkpoint.detect.gguf_keys.

The class of a model type has what no file says.  Of the table, `choices` tell model types of one architecture apart, by keys that
have to be a number, or true for any but 0, or to contain a text; `built` has entries of configs beside those that are compared;
`fixed` has what llama.cpp does whatever the class has; `window_patterns` are its periods of layers with a window, true for those
whose first layer has none; `windowed` have windows if a file states none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from qdsl.checkpoint.detect.gguf_keys import plain, table
from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.models.gguf_keys import entries_of, one_number, pattern_of_windows
from qdsl.models.gguf_maps import GgufMap, model_types_of, pattern_of
from qdsl.models.plan import LoadError
from qdsl.models.transformers.gguf_rope import set_rotary

EMBEDDING, HEAD = "token_embd.weight", "lm_head.weight"         # of files, and of models
REQUIRED = ("context_length", "embedding_length", "block_count")
HEADS, KV_HEADS = "attention.head_count", "attention.head_count_kv"
WINDOW, WINDOWS, RECURRENT = "sliding_window", "attention.sliding_window_pattern", "attention.recurrent_layers"
COUNTS = ("feed_forward_length", HEADS)                          # 0 in files of models that have none
SMALL = 1e-5                                                     # an epsilon that makes no difference
LARGEST = {"gemma2": 46, "gemma3_text": 62}                      # layers of models whose attention is scaled by another number
EXPERTS, ATTENTION = "ffn_gate_inp", ("attn_k", "attn_qkv", "attn_kv_b", "attn_k_b")           # tensors of layers
# Switches of configs that add tensors, by these tensors of a layer.
SWITCHES = {
    "attention_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias", "attn_qkv.bias"),
    "use_qkv_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"), "attention_out_bias": ("attn_output.bias",),
    "use_bias": ("attn_q.bias", "attn_output.bias", "ssm_in.bias"), "bias": ("attn_qkv.bias", "attn_output.bias"),
    "mlp_bias": ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"), "qk_layernorm": ("attn_q_norm.weight",),
    "use_qk_norm": ("attn_q_norm.weight",), "use_conv_bias": ("ssm_conv1d.bias",), "mamba_conv_bias": ("ssm_conv1d.bias",)}


def model_type_of(file: GgufFile, architecture: str) -> str:
    """The model type of a file.  Raises LoadError for an architecture without a map."""
    types = model_types_of(architecture)
    if not types:
        why = "llama.cpp knows it" if architecture in table()["others"] else "llama.cpp does not know it either"
        raise LoadError(f"{file.path}: architecture {architecture!r} has no map, so its weights have no places in a model of "
                        f"transformers ({why}); there are {', '.join(sorted(table()['architectures']))}")
    for model_type, conditions in table()["choices"].get(architecture, ()):
        values = {key: file.metadata.get(f"{architecture}.{key}", file.metadata.get(key)) for key in conditions}
        if all(_holds(plain(values[key]), wanted) for key, wanted in conditions.items()):
            return str(model_type)
    return types[0]


def _holds(value: Any, wanted: Any) -> bool:
    """Whether a value is as a condition wants it."""
    if isinstance(wanted, bool):
        return bool(value) == wanted
    return str(wanted) in str(value).lower() if isinstance(wanted, str) else bool(value == wanted)


def config_of_file(file: GgufFile, own: GgufMap) -> Any:
    """The config of a model type with the numbers of a file.  Raises LoadError for numbers that the class does not take."""
    start = f"{own.architecture}."
    missing = [name for name in REQUIRED if start + name not in file.metadata]
    if missing or EMBEDDING not in file.tensors:
        lacking = start + missing[0] if missing else EMBEDDING
        raise LoadError(f"{file.path}: has no {lacking}, without which llama.cpp loads no file")
    metadata = {key.removeprefix(start): plain(value) for key, value in file.metadata.items() if key.startswith(start)}
    _check_computed(file, metadata, own)
    try:
        config = _built(file, metadata, own)
    except (ValueError, TypeError, KeyError, ZeroDivisionError, StrictDataclassError) as error:
        raise LoadError(f"{file.path}: {own.model_class} takes no config with the numbers of the file: {error}") from error
    if config.model_type in LARGEST:                             # no key of a file: llama.cpp knows models by their layers
        is_largest = config.num_hidden_layers == LARGEST[config.model_type]
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if is_largest else config.head_dim
    set_rotary(config, file, own.architecture)
    return config


def _check_computed(file: GgufFile, metadata: Mapping[str, Any], own: GgufMap) -> None:
    """Raises LoadError for numbers that a config takes, and its class computes otherwise than llama.cpp."""
    groups, epsilon, norm = "expert_group_count", "attention.layer_norm_rms_epsilon", "expert_weights_norm"
    place = f"{file.path}: {own.architecture}"
    if own.model_type in table()["ungrouped"] and metadata.get(groups, 0) > 1:
        raise LoadError(f"{place}.{groups} is {metadata[groups]}: llama.cpp chooses groups otherwise than {own.model_class}")
    if own.model_type in table()["normed"] and not metadata.get(norm):
        raise LoadError(f"{place}.{norm} is not true: {own.model_class} divides weights of experts by their sum")
    period = table()["window_patterns"].get(own.architecture, (0,))[0]
    windows, layers = metadata.get(WINDOWS, period), metadata["block_count"]
    if own.model_type in table()["whole_periods"] and pattern_of_windows(windows, layers, own.architecture) != pattern_of_windows(
            period, layers, own.architecture):
        raise LoadError(f"{place}.{WINDOWS} is {windows}: llama.cpp rotates all but every {period}th layer, "
                        f"and {own.model_class} those with a window")
    if own.model_type in table()["small_epsilons"] and metadata.get(epsilon, 0) > 2 * SMALL:
        raise LoadError(f"{place}.{epsilon} is {metadata[epsilon]}: {own.model_class} has norms of another epsilon")


def _built(file: GgufFile, metadata: Mapping[str, Any], own: GgufMap) -> Any:
    """The config, whose rotary embeddings are not set yet."""
    cls = CONFIG_MAPPING[own.model_type]
    usual = cls()
    numbers: dict[str, Any] = {}
    for name, value in _named(metadata, own, usual):
        numbers.setdefault(name, value if isinstance(getattr(usual, name), list) else one_number(value))
    if isinstance(heads := metadata.get(HEADS), int) and heads and _is_settable(usual, "head_dim"):
        numbers.setdefault("head_dim", metadata["embedding_length"] // heads)
    if hasattr(usual, "mixer_rms_eps"):                          # of further norms, which have one epsilon in files
        numbers["mixer_rms_eps"] = metadata["attention.layer_norm_rms_epsilon"]
    _set_products(numbers, metadata, own, usual)
    _set_latent(numbers, metadata, file, usual)
    if not numbers.get(WINDOW) and hasattr(usual, WINDOW) and (
            WINDOW in numbers or own.architecture not in table()["windowed"]):
        numbers[WINDOW] = None                                   # absent and 0 are none
    for entries in (_windows, _heads, _layers):
        numbers |= dict(entries(file, {**metadata, **numbers}, own, usual))
    numbers |= {**table()["fixed"].get(own.model_type, {}), **_switches(file, own, usual)}
    if (head := own.rule(HEAD)) is not None:
        numbers["tie_word_embeddings"] = file.tensors.keys().isdisjoint(head.sources)
    numbers["vocab_size"] = file.tensors[EMBEDDING].logical_shape[0]
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        numbers[f"{role}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return cls(**{cls.attribute_map.get(name, name): value for name, value in numbers.items()})


def _switches(file: GgufFile, own: GgufMap, usual: Any) -> dict[str, bool]:
    """Switches of a config, by whether the file has their tensors; not those of whose tensors the map has none."""
    leaves = {pattern_of(name)[0].removeprefix("blk.{block}.") for name in file.tensors}
    return {switch: not leaves.isdisjoint(tensors) for switch, tensors in SWITCHES.items()
            if hasattr(usual, switch) and any(own.is_recorded(f"blk.0.{tensor}") for tensor in tensors)}


def _named(metadata: Mapping[str, Any], own: GgufMap, usual: Any) -> Iterator[tuple[str, Any]]:
    """Entries of a config that are a key, with its value: the first that the config has, all where layers have several."""
    for key in (*table()["settings"], *table()["built"]):
        if key not in metadata or key == WINDOWS or (key in COUNTS and metadata[key] == 0):
            continue
        entries = [*(entries_of(key, own) or ()), *table()["built"].get(key, ())]
        names = [name for name in entries if isinstance(name, str) and name.isidentifier() and _is_settable(usual, name)
                 and not (name == "head_dim" and key.startswith("rope."))]
        for name in names if isinstance(metadata[key], list) else names[:1]:
            yield name, metadata[key]


def _is_settable(usual: Any, name: str) -> bool:
    own = getattr(type(usual), name, None)
    return hasattr(usual, name) and not (isinstance(own, property) and own.fset is None)


def _set_products(numbers: dict[str, Any], metadata: Mapping[str, Any], own: GgufMap, usual: Any) -> None:
    """Set the other factor of products of which one is known, as the width of heads."""
    for key in [key for key in table()["settings"] if key in metadata and not key.startswith("rope.")]:
        products = (entry.split("*") for entry in entries_of(key, own) or () if isinstance(entry, str) and entry.count("*") == 1)
        names = next((names for names in products if all(hasattr(usual, name) for name in names)), [])
        factors, others = ([name for name in names if (name in numbers) == is_set] for is_set in (True, False))
        if len(factors) == len(others) == 1 and numbers[factors[0]]:
            numbers[others[0]] = metadata[key] // numbers[factors[0]]


def _set_latent(numbers: dict[str, Any], metadata: Mapping[str, Any], file: GgufFile, usual: Any) -> None:
    """Set the parts of heads' keys that rotate and those that do not."""
    width = metadata.get("attention.key_length_mla", metadata.get("attention.key_length"))
    if hasattr(usual, "qk_nope_head_dim") and width is not None:
        rotated, heads = metadata["rope.dimension_count"], metadata[HEADS]
        numbers |= {"qk_rope_head_dim": rotated, "qk_nope_head_dim": width - rotated, "num_key_value_heads": heads}
        numbers.setdefault("q_lora_rank", None)
        numbers.setdefault("v_head_dim", file.tensors["blk.0.attn_output.weight"].logical_shape[1] // heads)


def _windows(file: GgufFile, metadata: Mapping[str, Any], own: GgufMap, usual: Any) -> Iterator[tuple[str, Any]]:
    """Which layers have a window: those of the file, or by llama.cpp's period for the architecture."""
    windows = metadata.get(WINDOWS, table()["window_patterns"].get(own.architecture, (None,))[0])
    if windows is not None and _is_settable(usual, "layer_types"):
        count, has_window = int(metadata["block_count"]), metadata.get(WINDOW, getattr(usual, WINDOW, None))
        pattern = pattern_of_windows(windows, count, own.architecture) if has_window else [False] * count
        yield "layer_types", ["sliding_attention" if is_local else "full_attention" for is_local in pattern]


def _heads(file: GgufFile, metadata: Mapping[str, Any], own: GgufMap, usual: Any) -> Iterator[tuple[str, Any]]:
    """What the number of heads of keys says beside itself."""
    heads = metadata.get(KV_HEADS)
    has_two_norms = "blk.0.attn_norm_2.weight" in file.tensors
    if isinstance(heads, list) and not any(heads):               # as converters write where they miss layers of attention
        rows = [entry.logical_shape[0] for name, entry in file.tensors.items() if name.endswith(".attn_k.weight")]
        yield "num_key_value_heads", rows[0] * metadata[HEADS] // metadata["embedding_length"] if rows else metadata[HEADS]
    if hasattr(usual, "new_decoder_architecture"):
        yield "new_decoder_architecture", has_two_norms or heads != 1
        yield "num_ln_in_parallel_attn", 2 if has_two_norms else 1
        yield "multi_query", heads == 1


def _layers(file: GgufFile, metadata: Mapping[str, Any], own: GgufMap, usual: Any) -> Iterator[tuple[str, Any]]:
    """Which layers are of which kind."""
    attends, sparse = ([any(f"blk.{layer}.{leaf}.weight" in file.tensors for leaf in leaves)
                        for layer in range(metadata["block_count"])] for leaves in (ATTENTION, (EXPERTS,)))
    recurrent, heads = metadata.get(RECURRENT), metadata.get(KV_HEADS)
    is_hybrid = not all(attends) or (isinstance(heads, list) and 0 in heads)
    if recurrent is not None:
        yield "layer_types", ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent]
    elif hasattr(usual, "attn_layer_period"):
        yield from _periods(attends, ("attn_layer_period", "attn_layer_offset"), file)
    elif hasattr(usual, "attn_layer_indices"):
        yield "attn_layer_indices", [layer for layer, attends_here in enumerate(attends) if attends_here]
    elif is_hybrid and _is_settable(usual, "layer_types"):
        attention, other = ("attention", "mamba") if hasattr(usual, "mamba_n_heads") else ("full_attention", "conv")
        yield "layer_types", [attention if attends_here else other for attends_here in attends]
    if hasattr(usual, "mlp_layer_types"):
        yield "mlp_layer_types", ["sparse" if is_sparse else "dense" for is_sparse in sparse]
    if hasattr(usual, "expert_layer_period"):
        yield from _periods(sparse, ("expert_layer_period", "expert_layer_offset"), file)


def _periods(layers: Sequence[bool], names: tuple[str, str], file: GgufFile) -> Iterator[tuple[str, int]]:
    """The period and the first of some layers.  Raises LoadError where they have none."""
    places = [layer for layer, is_one in enumerate(layers) if is_one]
    period = places[1] - places[0] if len(places) > 1 else len(layers) + 1
    first = places[0] if places else len(layers)
    if [layer % period == first % period for layer in range(len(layers))] != list(layers):
        raise LoadError(f"{file.path}: layers {places} are of one kind, which the config cannot say")
    yield from zip(names, (period, first), strict=True)
