"""Record the maps of qdsl/models/maps: run llama.cpp's converter on tiny models whose numbers are their own places.

    QDSL_LLAMA_CPP=FOLDER python -m tests.trace_gguf_maps [MODEL_TYPE]...

FOLDER is vendor/llama.cpp in the source distribution of llama-cpp-python, which `make live` unpacks.  Every element of a model
has a value of its own, so the converter's result states where each went.  A rule must explain two models of different sizes.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.models.gguf_maps import (
    FOLDER,
    INVERSE,
    LATENT,
    VALUES,
    GgufMap,
    LoadError,
    TensorRule,
    joined_shape,
    map_of,
    pattern_of,
    row_order,
)
from qdsl.models.transformers.gguf_config import config_of_file
from tests.support import llama_cpp
from tests.support.gguf_models import logits
from tests.support.tiny_models import tiny_config, tiny_model, unusual

STEP = 2.0 ** -22                                                # between the values of two elements, exact in float32
FORWARD = {"": torch.clone, **INVERSE}
# Numbers of configs by which rows may be ordered, those that are likelier first.
AXES = ("num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts", "n_routed_experts", "num_heads",
        "n_head", "mamba_n_heads", "linear_num_key_heads", "linear_num_value_heads", "2", "3")
SECTIONS = ("by num_kv_heads: num_attention_heads num_kv_heads num_kv_heads",
            "by linear_num_key_heads: linear_num_key_heads*linear_key_head_dim linear_num_key_heads*linear_key_head_dim "
            "linear_num_value_heads*linear_value_head_dim linear_num_value_heads*linear_value_head_dim")
SCALED = ({"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64},
          {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
           "original_max_position_embeddings": 64})
FLAGS = ("attention_bias", "mlp_bias", "use_qkv_bias", "qkv_bias", "use_bias", "use_conv_bias", "use_qk_norm", "qk_layernorm",
         "use_parallel_residual", "parallel_attn", "bias")


@dataclass(frozen=True)
class Trace:
    """What the converter made of one tiny model.

    places: of every tensor of the file, the numbers of the elements that it has, and the name of their change.  starts: of every
    parameter, the number of its first element, and its shape.  orders: rules by the orders of rows that they give.
    """

    config: Any
    model_class: str
    architecture: str
    places: Mapping[str, tuple[np.ndarray, str]]
    unexplained: tuple[str, ...]
    starts: Mapping[str, tuple[int, tuple[int, ...]]]
    orders: dict[bytes, list[str]] = field(default_factory=dict)


def traced(model_type: str, size: int, **changes: Any) -> Trace:
    """Number the elements of a tiny model, convert it and read off where they went."""
    model = tiny_model(model_type, size, **changes)
    starts: dict[str, tuple[int, tuple[int, ...]]] = {}
    count, numbered = 0, set()
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and tensor.data_ptr() not in numbered:
                numbered.add(tensor.data_ptr())
                starts[name] = count, tuple(tensor.shape)
                numbers = torch.arange(count + 1, count + 1 + tensor.numel(), dtype=torch.float64) * STEP
                tensor.copy_(numbers.view(tensor.shape))
                count += tensor.numel()
    if count * STEP >= 1:
        raise ValueError(f"{count} elements are too many: make the tiny model smaller")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llama_cpp.add_tokenizer(Path(folder), model.config.vocab_size)
        architecture, arrays = llama_cpp.tensors(Path(folder))
    places = {name: place for name, array in arrays.items() if (place := _places(np.array(array), count)) is not None}
    return Trace(model.config, type(model).__name__, architecture, places, tuple(arrays.keys() - places.keys()), starts)


def _places(array: np.ndarray, count: int) -> tuple[np.ndarray, str] | None:
    """The numbers of the elements in a tensor, and by which name of VALUES they come back; None where none explains them."""
    tensor = torch.from_numpy(array)
    for change, forward in FORWARD.items():
        back = VALUES[change](tensor.double()) if change else tensor.double()
        numbers = torch.round(back / STEP).nan_to_num(0).long() - 1
        if bool(((numbers >= 0) & (numbers < count)).all()) and torch.equal(forward(((numbers + 1) * STEP).float()), tensor):
            return numbers.numpy(), change
    return None


def rules_of(trace: Trace) -> dict[str, list[TensorRule]]:
    """For each pattern of parameters, the rules that explain all of them, the plainest first; none for one without a source."""
    total = sum(np.prod(shape, dtype=int) for _, shape in trace.starts.values())
    names = list(trace.places)
    owner, place = np.full(total, -1), np.full(total, -1)
    for index, name in enumerate(names):
        numbers = trace.places[name][0].ravel()
        owner[numbers], place[numbers] = index, np.arange(numbers.size)
    rules: dict[str, list[TensorRule]] = {}
    for name, (start, shape) in trace.starts.items():
        span = slice(start, start + int(np.prod(shape, dtype=int)))
        pattern, block = pattern_of(name)
        own = list(_explanations(trace, names, owner[span].reshape(shape), place[span].reshape(shape), block))
        rules[pattern] = [rule for rule in rules[pattern] if rule in own] if pattern in rules else own
    return rules


def _explanations(trace: Trace, names: list[str], owner: np.ndarray, place: np.ndarray, block: str) -> Iterator[TensorRule]:
    """The rules by which a parameter consists of tensors.  owner, place: of each element, the tensor and where it lies there."""
    owners = list(dict.fromkeys(owner.ravel().tolist()))
    if -1 in owners:
        return
    full = [names[index] for index in owners]
    changes = {trace.places[name][1] for name in full}
    sources = tuple(pattern_of(name)[0] if block else name for name in full)
    if len(changes) > 1 or any(block and pattern_of(name)[1] not in ("", block) for name in full):
        return
    if len(full) == 2 and _is_latent(trace, full, owner, place, names):
        yield TensorRule(sources, LATENT)
        return
    shapes = [trace.places[name][0].shape for name in full]
    base = dict(zip(owners, np.cumsum([0, *(np.prod(shape, dtype=int) for shape in shapes[:-1])]).tolist(), strict=True))
    flat = place + np.vectorize(base.get)(owner)                 # the place in the tensors, one after the other
    change = changes.pop()
    for transposed in (False, True)[:1 + (flat.ndim > 1)]:
        taken = flat.swapaxes(-1, -2) if transposed else flat
        for elements in (False, True):
            count, columns = joined_shape(shapes, elements)
            if any(shape[-1] != columns for shape in shapes if columns > 1) or taken.size != count * columns:
                continue
            rows = taken.reshape(-1, columns)
            if (rows == rows[:, :1] + np.arange(columns)).all() and (rows[:, 0] % columns == 0).all():
                wanted = rows[:, 0] // columns
                if wanted.tobytes() not in trace.orders:
                    trace.orders[wanted.tobytes()] = list(_orders(trace.config, wanted))
                for order in trace.orders[wanted.tobytes()]:
                    yield TensorRule(sources, order, elements and bool(order), transposed, change)


def _is_latent(trace: Trace, full: list[str], owner: np.ndarray, place: np.ndarray, names: list[str]) -> bool:
    """Whether heads of a parameter consist of transposed keys and of values."""
    keys, values = (np.arange(trace.places[name][0].size).reshape(trace.places[name][0].shape) for name in full)
    if keys.ndim != 3 or values.ndim != 3 or keys.shape[:2] != values.shape[::2]:
        return False
    keys = keys.swapaxes(1, 2)
    places = np.concatenate([keys, values], 1)
    owners = np.concatenate([np.full_like(part, names.index(name)) for part, name in zip((keys, values), full, strict=True)], 1)
    return np.array_equal(places.ravel(), place.ravel()) and np.array_equal(owners.ravel(), owner.ravel())


def _orders(config: Any, wanted: np.ndarray) -> Iterator[str]:
    """Rules of rows that give an order."""
    if (wanted == np.arange(wanted.size)).all():
        yield ""
        return
    yield from (order for order in SECTIONS if _gives(order, config, wanted))
    axes = [axis for axis in AXES if axis.isdecimal() or isinstance(getattr(config, axis, None), int)]
    for first in axes:
        for second in ("2", "3", *axes[:-2]):
            for left in (f"{first} * {second}", f"{first} {second} *"):
                for right in permutations(left.split()):
                    order = f"{left} -> {' '.join(right)}"
                    if first != second and right != tuple(left.split()) and _gives(order, config, wanted):
                        yield order


def _gives(order: str, config: Any, wanted: np.ndarray) -> bool:
    try:
        return bool((row_order(order, config, wanted.size).numpy() == wanted).all())
    except LoadError:
        return False


def recorded(model_type: str) -> GgufMap:
    """The map of a model type, of two sizes, of unusual numbers and of those switches that its config has.

    Raises ValueError where no rule explains a parameter in all of them: some converters multiply weights by numbers of configs.
    """
    traces = [traced(model_type, 0), traced(model_type, 1), traced(model_type, 1, **unusual(model_type))]
    first = traces[0]
    rules = merged(rules_of(trace) for trace in traces)
    if missing := [name for name, own in rules.items() if not own]:
        raise ValueError(f"no rule for {', '.join(missing)}")
    for changes in variants(tiny_config(model_type)):
        try:
            trace = traced(model_type, 0, **changes)
        except Exception as error:
            print(f"  {model_type}: {changes}: {type(error).__name__}: {str(error)[:80]}")
            continue
        own = {name: rule for name, rule in rules_of(trace).items() if rule or name in rules}
        both = merged([rules, own])
        if all(both.values()):
            rules = both
            traces.append(trace)
        else:
            print(f"  {model_type}: {changes}: no common rule for {[name for name, rule in both.items() if not rule]}")
    plain = {name: own[0] for name, own in rules.items()}
    for name, rule in plain.items():                             # the converter permutes not all biases that llama.cpp rotates
        if name.endswith(".bias") and (weight := plain.get(name.removesuffix("bias") + "weight")) is not None and weight.rows:
            plain[name] = replace(rule, rows=weight.rows)
    unused = sorted({pattern_of(name)[0] for trace in traces for name in trace.unexplained})
    if not reads_config(model_type):
        raise ValueError("the config from a file is another one")
    return GgufMap(model_type, first.architecture, first.model_class, plain, tuple(unused))


def reads_config(model_type: str) -> bool:
    """Whether transformers computes the same by the config that it reads from the files of tiny models.

    Raises what the converter raises where it cannot write them.
    """
    for size in (0, 1):
        model = tiny_model(model_type, size, **unusual(model_type))
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            llama_cpp.add_tokenizer(Path(folder), model.config.vocab_size)
            path = llama_cpp.converted(Path(folder))
            try:
                if not _is_read(model, path):
                    print(f"  {model_type}: the config from a file is another one")
                    return False
            except Exception as error:
                print(f"  {model_type}: no config from a file: {type(error).__name__}: {str(error)[:120]!r}")
                return False
    return True


def _is_read(model: Any, path: Path) -> bool:
    """Whether the config of a model's file gives a model of the same type and logits."""
    with GgufFile(path) as file:
        architecture = str(file.metadata["general.architecture"])
        config = config_of_file(file, map_of(model.config.model_type, architecture))
    other = type(model)(config).float().eval()
    other.load_state_dict(model.state_dict())
    vocabulary = model.config.vocab_size
    return config.model_type == model.config.model_type and torch.allclose(logits(other, vocabulary), logits(model, vocabulary),
                                                                           rtol=0, atol=1e-5)


def variants(config: Any) -> Iterator[dict[str, Any]]:
    """Changes of a config that add tensors: biases, norms, and factors of rotary embeddings."""
    for flag in FLAGS:
        if isinstance(getattr(config, flag, None), bool):
            yield {flag: not getattr(config, flag)}
    if getattr(config, "q_lora_rank", None):
        yield {"q_lora_rank": None}
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_type" in rope:
        yield from ({"rope_parameters": {**rope, **scaled}} for scaled in SCALED)


def merged(several: Any) -> dict[str, list[TensorRule]]:
    """The rules that all models agree on."""
    rules: dict[str, list[TensorRule]] = {}
    for own in several:
        for name, candidates in own.items():
            rules[name] = [rule for rule in rules[name] if rule in candidates] if name in rules else candidates
    return rules


def main(model_types: list[str]) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    FOLDER.mkdir(exist_ok=True)
    for model_type in model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            own = recorded(model_type)
        except Exception as error:
            if model_types:
                print(f"{model_type}: {type(error).__name__}: {str(error)[:200]!r}")
            continue
        (FOLDER / f"{model_type}.json").write_text(own.text())
        print(f"{model_type}: {own.architecture}, {len(own.rules)} rules")


if __name__ == "__main__":
    main(sys.argv[1:])
