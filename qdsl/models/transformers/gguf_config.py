"""Configs of transformers from the metadata and tensors of GGUF files, by the table of qdsl.checkpoint.detect.gguf_keys.

The class of a model type has what no file says.  Of the table, `choices` tell model types of one architecture apart, by keys that
have to be a number, or true for any but 0, or to contain a text; `built` has entries of configs beside those that are compared;
`fixed` has what llama.cpp does whatever the class has; `window_patterns` are its periods of layers with a window, true for those
whose first layer has none; `windowed` have windows if a file states none; `sinks` have layers with a window of 0 tokens;
`undefined` has keys by whose 0 llama.cpp computes no numbers; `routers` have the gate of a class, and whether it divides weights
of experts by their sum, null for what its config says; `softmax` has architectures whose usual gate that is;
`further` has places of tensors in other sizes of a model, and `dense` entries of a config, or keys, where it has no experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from qdsl.checkpoint.detect.gguf_keys import are_close, is_read, is_usual, plain, table
from qdsl.checkpoint.detect.gguf_weights import companions
from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.models.gguf_keys import PREDICTED, entries_of, one_number, pattern_of_windows, unused_keys
from qdsl.models.gguf_maps import BLOCK, GgufMap, TensorRule, model_types_of, pattern_of
from qdsl.models.plan import LoadError
from qdsl.models.transformers.gguf_additions import additions
from qdsl.models.transformers.gguf_rope import FREQUENCIES, LONG, SHORT, head_width, rotated_rows, set_rotary

EMBEDDING, HEAD = "token_embd.weight", "lm_head.weight"         # of files, and of models
REQUIRED = ("context_length", "embedding_length", "block_count")
HEADS, KV_HEADS = "attention.head_count", "attention.head_count_kv"
HEADS_OF_LAYERS = "num_attention_heads_per_layer"               # which some classes have
WINDOW, KEY, WINDOWS = "sliding_window", "attention.sliding_window", "attention.sliding_window_pattern"
RECURRENT = "attention.recurrent_layers"
# llama.cpp's numbers where a file has none, or 0; classes have others.
DEFAULTS = {"expert_weights_scale": 1.0, "expert_weights_norm": False, "embedding_scale": 1.0, "residual_scale": 1.0,
            "logit_scale": 1.0, "expert_group_count": 1, "expert_group_used_count": 1}
COUNTS = ("feed_forward_length", HEADS)                          # 0 in files of models that have none
CAUSAL, GATE, NORMED, SCALE = "attention.causal", "expert_gating_func", "expert_weights_norm", "expert_weights_scale"
EXPERT_COUNT, USED = "expert_count", "expert_used_count"
GROUPS, CHOSEN = "expert_group_count", "expert_group_used_count"
SOFTMAX, SIGMOID = 1, 2                                          # gates
WIDTH = "attention.key_length"
RMS, PARALLEL = "rms_norm_eps", "use_parallel_residual"
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
CLAMP = "clip_qkv"
POSITIVE = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
ATTENTION_SCALE = "attention.scale"
QKV = ("attn_q", "attn_k", "attn_v")
# Layers of which llama.cpp reads a scale of the product, and those of which it then uses it for some model types only.
SCALED = (*QKV, "attn_output", "attn_qkv", "ssm_in", "ssm_out")
SCALED_EXPERTS = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}
UNSCALED = ("attn_gate", "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", *SCALED_EXPERTS)
LARGEST = {"gemma2": 46, "gemma3_text": 62}                      # layers of models whose attention is scaled by another number
# Tensors of layers of a kind.
EXPERTS = ("ffn_gate_inp", "ffn_down_exps")
ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_kv_b", "attn_k_b")
# Switches of configs that add tensors, by these tensors of a layer.
SWITCHES = {
    "attention_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias", "attn_qkv.bias"),
    "use_qkv_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_qkv.bias"), "attention_out_bias": ("attn_output.bias",),
    "use_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias", "ssm_in.bias", "attn_qkv.bias"),
    "bias": ("attn_qkv.bias", "attn_output.bias"),
    "mlp_bias": ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"), "qk_layernorm": ("attn_q_norm.weight",),
    "use_qk_norm": ("attn_q_norm.weight",), "use_conv_bias": ("ssm_conv1d.bias",), "mamba_conv_bias": ("ssm_conv1d.bias",)}


def model_type_of(file: GgufFile, architecture: str) -> str:
    """The model type of a file.  Raises LoadError for an architecture without a map."""
    types = model_types_of(architecture)
    if not types:
        why = "llama.cpp knows it" if architecture in table()["others"] else "llama.cpp does not know it either"
        why += ", as an encoder of images or sound beside a language model" if architecture == "clip" else ""
        raise LoadError(f"{file.path}: architecture {architecture!r} has no map, so its weights have no places in a model of "
                        f"transformers ({why}); there are {', '.join(sorted(table()['architectures']))}")
    names = " ".join(file.tensors)
    for model_type, conditions in table()["choices"].get(architecture, ()):
        values = {key: file.metadata.get(f"{architecture}.{key}", file.metadata.get(key, key in names)) for key in conditions}
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
    if missing := next(_missing(file, own), ""):
        raise LoadError(f"{file.path}: has no {missing}, without which llama.cpp loads no file")
    unused = unused_keys(file.metadata, own, rotates=True)
    metadata = {name: plain(value) for key, value in file.metadata.items()
                if key.startswith(start) and (name := key.removeprefix(start)) not in unused}
    if not hasattr(CONFIG_MAPPING[own.model_type](), HEADS_OF_LAYERS):
        metadata |= {key: value[0] for key in (*COUNTS, KV_HEADS)
                     if isinstance(value := metadata.get(key), list) and len({*value}) == 1}
    count = metadata["block_count"]
    layers = metadata["block_count"] = count - metadata.get(PREDICTED, 0)
    metadata |= {key: value[:layers] for key, value in metadata.items() if isinstance(value, list) and len(value) == count}
    _check_computed(file, metadata, own)
    uneven = _take_uneven(metadata, own)
    try:
        config = _built(file, _with_defaults(metadata, own), own)
    except (ValueError, TypeError, KeyError, ZeroDivisionError, StrictDataclassError) as error:
        raise LoadError(f"{file.path}: {own.model_class} takes no config with the numbers of the file: {error}") from error
    if config.model_type in LARGEST:                             # no key of a file: llama.cpp knows models by their layers
        is_largest = config.num_hidden_layers == LARGEST[config.model_type]
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if is_largest else config.head_dim
    set_rotary(config, file, own.architecture)
    for name, value in (*_added(metadata, own, config), *uneven.items()):
        additions(config)[name] = value
    return config


def _take_uneven(metadata: dict[str, Any], own: GgufMap) -> dict[str, list[int]]:
    """Numbers of heads that differ between layers, where llama.cpp computes so; one number for all stays.

    It takes the first layer's for the others, too, in all other architectures, whose tensors then have to fit.
    """
    uneven = {key: value for key in (*COUNTS, KV_HEADS) if isinstance(value := metadata.get(key), list)
              and len({*value} - {0}) > 1 and not (key == HEADS and hasattr(CONFIG_MAPPING[own.model_type](), HEADS_OF_LAYERS))}
    for key, value in uneven.items():
        usual = next(number for number in value if number)
        metadata[key] = [usual if number else 0 for number in value] if 0 in value else usual
    return {key: value for key, value in uneven.items() if key in table()["uneven"].get(own.architecture, ())}


def _missing(file: GgufFile, own: GgufMap) -> Iterator[str]:
    """The keys and tensors that llama.cpp needs and a file lacks, beside tensors that the model has no switch for."""
    required, start = table()["required"].get(own.model_type, ()), f"{own.architecture}."
    # keys of experts are not read without them, but by architectures that do not need their number
    is_dense = "expert_used_count" in required and not file.metadata.get(f"{start}expert_count")
    yield from (start + name for name in (*REQUIRED, *required)
                if start + name not in file.metadata and not (is_dense and name.startswith("expert_")))
    if EMBEDDING not in file.tensors:
        yield EMBEDDING
    for bias in table()["needed"].get(own.model_type, ()):
        weight = bias.removesuffix("bias") + "weight"
        yield from (name for tensor in file.tensors for pattern, block in [pattern_of(tensor)] if pattern == weight
                    and bias != weight and (name := bias.replace(BLOCK, block)) not in file.tensors)


def _added(metadata: Mapping[str, Any], own: GgufMap, config: Any) -> Iterator[tuple[str, Any]]:
    """What the class of a model type has no entry for, and is added to the model."""
    if own.model_type in table()["whole_periods"]:               # llama.cpp rotates all but every so many
        period, *_ = table()["window_patterns"][own.architecture]
        rotated = pattern_of_windows(period, config.num_hidden_layers, own.architecture)
        if rotated != [kind == "sliding_attention" for kind in config.layer_types]:
            yield "rotated_layers", rotated
    if metadata.get(CAUSAL) is False:
        yield CAUSAL, False
    if metadata.get(ATTENTION_SCALE, 0) < 0 and any(hasattr(config, name) for name in entries_of(ATTENTION_SCALE, own)):
        yield ATTENTION_SCALE, metadata[ATTENTION_SCALE]
    if own.model_type in table()["sinks"] and metadata.get(KEY) == 0:
        yield KEY, 0
    if own.model_type in table()["routers"] and metadata.get("expert_count") and (rule := _routing_rule(metadata, own, config)):
        yield GATE, rule
    for key, usual in table()["added"].get(own.model_type, {}).items():
        if key in metadata and not are_close(metadata[key], usual) and not is_usual(key, metadata[key]):
            yield key, metadata[key]


def _routing_rule(metadata: Mapping[str, Any], own: GgufMap, config: Any) -> dict[str, Any]:
    """How llama.cpp chooses and weighs experts; {} where the class does so."""
    gate, normed, *later = table()["routers"][own.model_type]
    soft, scale = table()["softmax"].get(own.architecture), metadata.get(SCALE) or 1.0
    is_sigmoid = soft is None or (config.num_hidden_layers in soft["but_layers"] and config.vocab_size == soft["but_tokens"])
    usual = SIGMOID if is_sigmoid else SOFTMAX                   # where a file states none
    rule = {"gate": (metadata.get(GATE) or usual) if is_read(GATE, own.architecture) else gate,
            "normed": bool(metadata.get(NORMED)) if is_read(NORMED, own.architecture) else normed,
            "scale": 1.0 if later or not is_read(SCALE, own.architecture) else scale,
            "groups": metadata.get(GROUPS) or 1, "chosen_groups": metadata.get(CHOSEN) or 1}
    has_scale = any(hasattr(config, str(name)) for name in entries_of(SCALE, own))
    is_same = rule["gate"] == gate and normed in (None, rule["normed"]) and (has_scale or rule["scale"] == 1)
    has_groups = hasattr(config, "n_group") and own.model_type not in table()["ungrouped"]
    return {} if is_same and (has_groups or rule["groups"] == 1) else rule


def with_additions(own: GgufMap, config: Any, file: GgufFile, is_read: bool) -> GgufMap:
    """The map of a file in which the class's missing biases have places, and rows that it rotates otherwise their order.

    The config's entry says which biases, so that the model is given them.  is_read: the config is the file's own.
    """
    further = {name: rule for name, source in table()["further"].get(own.model_type, {}).items()
               if (rule := TensorRule.of({"from": source})).sources[0].replace(BLOCK, "0") in file.tensors}
    rules, unused, biases = {**own.rules, **further}, list(own.unused), []
    for leaf in table()["biases"].get(own.model_type, ()):
        source = f"blk.{BLOCK}.{leaf}.bias"
        stored = (source, f"blk.{BLOCK}.attn_qkv.bias") if leaf in QKV else (source,)
        name, rule = next((name, rule) for name, rule in rules.items() if rule.sources == (f"blk.{BLOCK}.{leaf}.weight",))
        rules[f"{name.removesuffix('weight')}bias"] = replace(rule, sources=(source,))
        biases += [name.removesuffix(".weight").replace(BLOCK, block) for tensor in file.tensors
                   for pattern, block in [pattern_of(tensor)] if pattern in stored]
    if biases:
        additions(config)["biases"] = sorted(biases)
    if scales := _all_scales(file, own, rules):
        additions(config).update(scales)
    unused += [name for name in file.tensors if _scaled(name, file)]
    for leaf in table()["unadded"].get(own.model_type, ()) if is_read else ():
        name, rule = next((name, rule) for name, rule in rules.items() if rule.sources == (leaf,))
        rules[name], unused = replace(rule, sources=("",)), [*unused, leaf]
    if file.metadata.get(f"{own.architecture}.{PREDICTED}") and own.architecture in table()["predicting"]:
        unused += [name for name in file.tensors
                   if (block := pattern_of(name)[1]).isdecimal() and int(block) >= config.num_hidden_layers]
    kind = file.metadata.get(f"{own.architecture}.rope.scaling.type")
    tensors = (SHORT, LONG) if kind == "longrope" else (FREQUENCIES,)
    unused += [name for name in tensors if name in table()["rope_tensors"].get(own.architecture, ())]
    rotates = getattr(config, "position_embedding_type", "rope") == "rope"
    is_permuted = is_read and rotates and own.model_type in table()["permuted"]
    if rows := rotated_rows(config, is_permuted):
        for name, rule in rules.items():
            if any(part in rule.sources[0] for part in (".attn_q", ".attn_k.", ".attn_k_norm")):
                if (rule.rows and not is_permuted) or rule.elements or rule.transposed or len(rule.sources) > 1:
                    raise LoadError(f"{file.path}: {name} of {own.model_class} has rows in another order, by which parts of "
                                    "heads rotate: it cannot be expressed")
                rules[name] = replace(rule, rows=rows)
    return replace(own, rules={**rules, **dict(_joined(file, config, rules))}, unused=tuple(unused))


def _joined(file: GgufFile, config: Any, rules: Mapping[str, TensorRule]) -> Iterator[tuple[str, TensorRule]]:
    """Rules of parameters, of one layer each, whose tensors a file holds joined, as llama.cpp's converter writes on demand."""
    names = {rule.sources: name for name, rule in rules.items()}
    for tensor, entry in file.tensors.items():
        pattern, block = pattern_of(tensor)
        stem, _, leaf = pattern.rpartition(".")
        gates = (f"blk.{BLOCK}.ffn_gate_exps.{leaf}", f"blk.{BLOCK}.ffn_up_exps.{leaf}")
        parts = [part for name in QKV if (part := (f"blk.{BLOCK}.{name}.{leaf}",)) in names]
        if (pattern,) in names:
            continue
        if stem.endswith(".ffn_gate_up_exps") and gates in names:
            rule = rules[names[gates]]
            rows = f"{entry.logical_shape[0]} 2 * -> {entry.logical_shape[0]} * 2" if rule.rows.endswith(" 2") else ""
            yield names[gates].replace(BLOCK, block), replace(rule, sources=(tensor,), rows=rows)
        elif stem.endswith(".attn_qkv") and len(parts) == len(QKV):
            count, stop = config.num_key_value_heads * head_width(config), entry.logical_shape[0]
            spans = (f"0:{stop - 2 * count}", f"{stop - 2 * count}:{stop - count}", f"{stop - count}:{stop}")
            for name, span in zip((names[part] for part in parts), spans, strict=True):
                yield name.replace(BLOCK, block), replace(rules[name], sources=(tensor,), rows=f"of {span}, {rules[name].rows}")


def _scaled(name: str, file: GgufFile) -> str:
    """The layer whose product a tensor scales, without its number; '' for others, and for NVFP4's, which are of their blocks."""
    stem, _, leaf = name.rpartition(".")
    weight, own = file.tensors.get(f"{stem}.weight"), stem.rpartition(".")[2]
    is_one = leaf == "scale" and own in (*SCALED, *UNSCALED) and weight is not None and leaf not in companions(file, weight)
    return own if is_one else ""


def left_out(name: str, file: GgufFile, own: GgufMap) -> bool:
    """Whether a tensor is a scale that llama.cpp reads and does not use."""
    layer, more, less = _scaled(name, file), *(table()[row].get(own.model_type, ()) for row in ("scaled", "unscaled"))
    return layer in less or (layer in UNSCALED and layer not in more)


def _all_scales(file: GgufFile, own: GgufMap, rules: Mapping[str, TensorRule]) -> dict[str, Any]:
    """The additions to a config that are scales of products."""
    scales = {"scales": dict(_scales(file, own, rules)), "expert_scales": _expert_scales(file, own, rules)}
    return {key: value for key, value in scales.items() if value}


def _scales(file: GgufFile, own: GgufMap, rules: Mapping[str, TensorRule]) -> Iterator[tuple[str, float]]:
    """The names of layers, and the numbers by which their products are multiplied."""
    layers = {rule.sources[0]: name.removesuffix(".weight") for name, rule in rules.items() if len(rule.sources) == 1}
    for name in [name for name in file.tensors if _scaled(name, file) and not left_out(name, file, own)]:
        if _scaled(name, file) in SCALED_EXPERTS:
            continue
        pattern, block = pattern_of(name.removesuffix("scale") + "weight")
        if pattern not in layers:
            raise LoadError(f"{file.path}: tensor {name!r} scales a part of a layer, which cannot be expressed")
        yield layers[pattern].replace(BLOCK, block), float(file.tensor(name).flatten()[0])


def _expert_scales(file: GgufFile, own: GgufMap, rules: Mapping[str, TensorRule]) -> dict[str, dict[str, list[float]]]:
    """Numbers by which experts' products are multiplied, by the names of their modules and the kinds of products."""
    modules = {source: name.rpartition(".")[0] for name, rule in rules.items() for source in rule.sources}
    scales: dict[str, dict[str, list[float]]] = {}
    for name in [name for name in file.tensors if _scaled(name, file) in SCALED_EXPERTS and not left_out(name, file, own)]:
        pattern, block = pattern_of(name.removesuffix("scale") + "weight")
        kinds = scales.setdefault(modules[pattern].replace(BLOCK, block), {})
        kinds[SCALED_EXPERTS[_scaled(name, file)]] = file.tensor(name).float().flatten().tolist()
    return scales


def _with_defaults(metadata: Mapping[str, Any], own: GgufMap) -> dict[str, Any]:
    """The numbers of a file with llama.cpp's where it has none, whatever the class has then.  0 is no factor."""
    defaults = {key: value for key, value in DEFAULTS.items() if is_read(key, own.architecture)}
    if metadata.get(HEADS) and not metadata.get(KV_HEADS):
        defaults[KV_HEADS] = metadata[HEADS]
    is_open = is_read(ATTENTION_SCALE, own.architecture) and not metadata.get(ATTENTION_SCALE)
    if is_open and isinstance(heads := metadata.get(HEADS), int) and heads:
        defaults[ATTENTION_SCALE] = (metadata.get("attention.key_length") or metadata["embedding_length"] // heads) ** -0.5
    return {**metadata, **{key: value for key, value in defaults.items() if not metadata.get(key)}}


def _check_computed(file: GgufFile, metadata: Mapping[str, Any], own: GgufMap) -> None:
    """Raises LoadError for numbers that a config takes, and its class computes otherwise than llama.cpp."""
    place = f"{file.path}: {own.architecture}"
    if zero := next((key for key in table()["undefined"].get(own.model_type, ()) if metadata.get(key) == 0), ""):
        raise LoadError(f"{place}.{zero} is 0: llama.cpp computes no numbers by it")
    tokens, rows = file.metadata.stored().get("tokenizer.ggml.tokens"), file.tensors[EMBEDDING].logical_shape[0]
    if tokens is not None and tokens.count != rows:
        raise LoadError(f"{file.path}: has {tokens.count} tokens, and {EMBEDDING} {rows} rows: llama.cpp loads no such file")
    if isinstance(heads := metadata.get(HEADS), int) and heads > metadata["embedding_length"] and not metadata.get(WIDTH):
        raise LoadError(f"{place} has {heads} heads of attention for {metadata['embedding_length']} numbers")
    used, every = ((value if isinstance(value, list) else [value]) for value in (metadata.get(USED), metadata.get(EXPERT_COUNT)))
    if every[0] and any(own is not None and not 0 < own <= max(every) for own in used):
        raise LoadError(f"{place}.{USED} is {metadata[USED]} of {every[0]} experts, by which llama.cpp computes nothing")
    epsilons = [key for key in POSITIVE if is_read(key, own.architecture)]
    if wrong := next((key for key in epsilons if isinstance(value := metadata.get(key, 0), float) and value < 0), ""):
        raise LoadError(f"{place}.{wrong} is {metadata[wrong]}: it is below 0")
    if own.model_type in table()["causal"] and metadata.get(CAUSAL) is False:
        raise LoadError(f"{place}.{CAUSAL} is false: {table()['causal'][own.model_type]}")


def _built(file: GgufFile, metadata: Mapping[str, Any], own: GgufMap) -> Any:
    """The config, whose rotary embeddings are not set yet."""
    cls = CONFIG_MAPPING[own.model_type]
    usual = cls()
    numbers: dict[str, Any] = {}
    for name, value in _named(metadata, own, usual):
        is_one = isinstance(getattr(usual, name), int) and name in (entries_of(HEADS, own) or ())
        numbers.setdefault(name, value if isinstance(getattr(usual, name), list) else
                           next(filter(None, value), 0) if is_one and isinstance(value, list) else one_number(value))
    if isinstance(heads := metadata.get(HEADS), int) and heads and _is_settable(usual, "head_dim"):
        numbers.setdefault("head_dim", metadata["embedding_length"] // heads)
    # which llama.cpp takes for none: of two kinds of norms, those of which there is an epsilon are computed
    numbers |= {name: None for name in (*CAPS, RMS) if numbers.get(name) == 0 and (name != RMS or getattr(usual, RMS, 0) is None)}
    numbers |= {CLAMP: None} if numbers.get(CLAMP, 1) <= 0 else {}
    if hasattr(usual, "mixer_rms_eps"):                          # of further norms, which have one epsilon in files
        numbers["mixer_rms_eps"] = metadata["attention.layer_norm_rms_epsilon"]
    _set_products(numbers, metadata, own, usual)
    _set_latent(numbers, metadata, file, usual)
    if not numbers.get(WINDOW) and hasattr(usual, WINDOW) and (WINDOW in numbers or own.architecture not in table()["windowed"]):
        numbers[WINDOW] = metadata["context_length"] if own.model_type in table()["masked"] else None     # absent and 0 are none
    for entries in (_windows, _heads, _layers):
        numbers |= dict(entries(file, {**metadata, **numbers}, own, usual))
    numbers |= {**table()["fixed"].get(own.model_type, {}), **_switches(file, own, usual)}
    for name, value in table()["dense"].get(own.model_type, {}).items() if not metadata.get("expert_count") else ():
        numbers[name] = metadata[value] if isinstance(value, str) else value
    if hasattr(usual, "position_embedding_type") and metadata.get("rope.scaling.finetuned", True):
        numbers["position_embedding_type"] = "rope"              # by which llama.cpp, and this class, rotate at all
    if own.rule(HEAD) is not None:
        numbers["tie_word_embeddings"] = is_tied(file, own)
    numbers["vocab_size"] = file.tensors[EMBEDDING].logical_shape[0]
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        numbers[f"{role}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return cls(**{cls.attribute_map.get(name, name): value for name, value in numbers.items()})


def is_tied(file: GgufFile, own: GgufMap) -> bool:
    """Whether the head is the embedding: where a file has none, unless llama.cpp needs it."""
    sources = {source for name, rule in own.rules.items() if name == HEAD for source in rule.sources}
    return bool(sources) and file.tensors.keys().isdisjoint(sources) and sources.isdisjoint(
        table()["needed"].get(own.model_type, ()))


def _switches(file: GgufFile, own: GgufMap, usual: Any) -> dict[str, bool]:
    """Switches of a config, by whether the file has their tensors; not those of whose tensors the map has none."""
    leaves = {pattern_of(name)[0].removeprefix("blk.{block}.") for name in file.tensors}
    switches = {switch: not leaves.isdisjoint(tensors) for switch, tensors in SWITCHES.items()
                if hasattr(usual, switch) and any(own.is_recorded(f"blk.0.{tensor}") for tensor in tensors)}
    if hasattr(usual, PARALLEL) and not is_read(PARALLEL, own.architecture):
        switches[PARALLEL] = "ffn_norm.weight" not in leaves     # one norm is that of both parts of a layer
    return switches


def _named(metadata: Mapping[str, Any], own: GgufMap, usual: Any) -> Iterator[tuple[str, Any]]:
    """Entries of a config that are a key, with its value: the first that the config has, all where layers have several."""
    for key in (*table()["settings"], *table()["built"]):
        if key not in metadata or key == WINDOWS or (key in COUNTS and metadata[key] == 0) or not (
                is_read(key, own.architecture) or key in table()["inert"]):
            continue
        entries = [*(entries_of(key, own) or ()), *table()["built"].get(key, ())]
        names = [name for name in entries if isinstance(name, str) and name.isidentifier() and _is_settable(usual, name)
                 and not (name == "head_dim" and key.startswith("rope."))]
        for name in names if isinstance(metadata[key], list) else names[:1]:
            yield name, metadata[key]


def _is_settable(usual: Any, name: str) -> bool:
    own = getattr(type(usual), usual.attribute_map.get(name, name), None)
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
        count, has_window = int(metadata["block_count"]), own.model_type in table()["sinks"] or metadata.get(
            KEY, own.architecture in table()["windowed"])
        pattern = pattern_of_windows(windows, count, own.architecture) if has_window else [False] * count
        local = "chunked_attention" if hasattr(usual, "attention_chunk_size") else "sliding_attention"
        yield "layer_types", [local if is_local else "full_attention" for is_local in pattern]


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
                        for layer in range(metadata["block_count"])] for leaves in (ATTENTION, EXPERTS))
    recurrent, heads = metadata.get(RECURRENT), metadata.get(KV_HEADS)
    is_hybrid = not all(attends) or (isinstance(heads, list) and 0 in heads)
    if recurrent is not None:
        yield "layer_types", ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent]
    elif hasattr(usual, "attn_layer_period"):
        yield from _periods(attends, ("attn_layer_period", "attn_layer_offset"), file)
    elif hasattr(usual, "attn_layer_indices"):
        yield "attn_layer_indices", [layer for layer, attends_here in enumerate(attends) if attends_here]
    elif is_hybrid and _is_settable(usual, "layer_types") and (hasattr(usual, "mamba_n_heads") or hasattr(usual, "conv_L_cache")):
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
