"""A folder of a language model as the source of a GGUF file: its tensors and metadata, as llama.cpp's converter writes them.

The recorded maps, inverted, give the tensors; gguf_settings.json, with the converter's rules, the settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gguf
import torch
from torch import Tensor

from qdsl.checkpoint.detect.groups import refuse_groups
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.detect.ledger import refuse_changes
from qdsl.checkpoint.files.crc import Range
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.safetensors import CheckpointError, shown, torch_dtypes
from qdsl.host.files import read_text
from qdsl.jobs.gguf import QuantizeError, mixes
from qdsl.jobs.gguf.source import model_of
from qdsl.models.gguf_maps import FOLDER as MAPS
from qdsl.models.gguf_maps import GgufMap, TensorRule, is_row_wise, row_order, source_rows, source_tensors
from qdsl.models.gguf_vocabulary import add_vocabulary, json_of
from qdsl.models.names import Names
from qdsl.models.plan import LoadError, listed
from qdsl.models.save import QUANTIZATION

if TYPE_CHECKING:
    from qdsl.models.conversions import Conversions

SETTINGS = Path(__file__).parent / "gguf_settings.json"
UNUSED = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq")      # what the converter leaves out
FLOATS = ("F32", "F16", "BF16")
# Tensors that the converter always stores in float32, besides norms, vectors and those that are no weights.
FLOAT32 = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight", "shortconv.conv.weight",
           "position_embd.weight", "token_types.weight")
FREQUENCIES = "rope_freqs.weight"
TYPES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
WORDS = dict(zip(gguf.GGUFValueType, TYPES, strict=True))


@dataclass(frozen=True)
class Assembly:
    """The rows that a tensor of the GGUF file consists of.

    parts: tensors of the folder that follow one another as a parameter of the model.  shape: of that parameter.  rule: its rule
    in the map.  place: which source of the rule the tensor is.  first, last: its rows among those of all sources.
    """

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    rule: TensorRule
    place: int
    first: int
    last: int


class LanguageFolder:
    """A language model of transformers, to be written as a GGUF file: a `Source` of qdsl.jobs.gguf.

    Only headers, config and tokenizer are read before `rows`.  Raises QuantizeError for models that cannot be written exactly,
    and CheckpointError for settings and tensors that are not computed, unless `allow_unknown`.
    """

    def __init__(self, path: Path, allow_unknown: bool = False) -> None:
        from transformers import AutoConfig  # seconds, which processes that read rows alone do not need

        self.path, self.folder = path, Folder(path, copies=True)
        self.paths = self.folder.shards
        detected = layers(self.folder)
        refuse_changes(path, detected.findings, allow_unknown)
        refuse_groups(self.folder, detected.groups)
        try:
            config = AutoConfig.from_pretrained(path)
        except Exception as error:                               # of many kinds, by what is wrong
            raise QuantizeError(f"{path / 'config.json'}: transformers does not read it: {error}") from error
        try:
            self._read_headers(config)
        except (CheckpointError, QuantizeError, OSError, ImportError, MemoryError):
            raise
        except Exception as error:                               # of many kinds: any value may be of another type
            raise QuantizeError(f"{path}: config.json or a file of the tokenizer has a value that it cannot have: "
                                f"{type(error).__name__}: {error}") from error

    def _read_headers(self, config: Any) -> None:
        """Reads what the file holds from the config, the headers and the tokenizer."""
        path, settings = self.path, self._settings(config)
        own = GgufMap.read(MAPS / f"{config.model_type}.json")
        if list(config.architectures or ()) != [own.model_class]:
            raise QuantizeError(f"{path / 'config.json'}: architectures are {config.architectures}; of model type "
                                f"{config.model_type!r} {own.model_class} is written")
        self.assemblies = self._assemblies(config, own)
        self.axes = SimpleNamespace(**_axes(config, self.assemblies.values()))
        self.generated = _frequencies(config.to_dict(), own, path)
        self.tensors = {name: mixes.Tensor(name, tuple(tensor.shape), "F32") for name, tensor in self.generated.items()}
        for name, assembly in self.assemblies.items():
            shape = self._shapes(assembly)[assembly.place]
            self.tensors[name] = mixes.Tensor(name, shape, self._type(name, len(shape), assembly.parts))
        self.metadata = self._metadata(config.to_dict(), own, settings)
        self._cache: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to read rows, without transformers and the mapped files."""
        return {key: value for key, value in vars(self).items() if key not in ("folder", "metadata", "_cache")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, folder=Folder(state["path"], copies=True), metadata={}, _cache={})

    # -- what is refused ----------------------------------------------------------------------------------------------

    def _settings(self, config: Any) -> Mapping[str, Any]:
        """The rules of the model type.  Raises QuantizeError for a config with unsupported settings."""
        rules, place = json_of(SETTINGS), self.path / "config.json"
        if config.model_type not in rules["models"]:
            raise QuantizeError(f"{place}: model type {config.model_type!r} is not written as a GGUF file yet, those are "
                                f"{', '.join(rules['models'])}; make a GGUF file of it with llama.cpp's convert_hf_to_gguf.py "
                                "--outtype bf16, and quantize that")
        entries = config.to_dict()
        if wrong := [key for key in rules["refused"] if entries.get(key) is not None]:
            plain = "; `qdsl dequantize` writes a plain folder, which can be" if wrong[0] in QUANTIZATION else ""
            raise QuantizeError(f"{place}: has {wrong[0]!r}, which is not written to a GGUF file{plain}")
        if (self.path / "modules.json").is_file():
            raise QuantizeError(f"{self.path / 'modules.json'}: a model of sentence embeddings, which is not written yet")
        card = self.path / "README.md"
        hints = (self.path.resolve().name, str(entries.get("_name_or_path", "")), read_text(card) if card.is_file() else "")
        if any("reranker" in hint.lower() for hint in hints):
            raise QuantizeError(f"{self.path}: a reranker, which is not written yet")
        return {**rules["models"][config.model_type], "common": rules["settings"]}

    # -- tensors ------------------------------------------------------------------------------------------------------

    def _assemblies(self, config: Any, own: GgufMap) -> dict[str, Assembly]:
        """The rows of every tensor of the GGUF file.  Raises QuantizeError for tensors without a place in it."""
        from transformers import AutoModelForCausalLM

        from qdsl.models.conversions import Conversions

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
        parts, unknown = self._parts(Conversions.of(model), own)
        state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        filled = {name for own_name in parts for name in (own_name, *Names(model).tied(own_name))}
        problems = [f"no tensor for {listed(missing)}"] if (missing := [name for name in state if name not in filled]) else []
        problems += [f"no place in a GGUF file for {listed(unknown)}"] if unknown else []
        shapes = {name: [self.folder.entry(part).shape for part in own_parts] for name, own_parts in parts.items()}
        problems += [f"{shown(name)} is {list(state[name])} by config.json, and the folder has {str([*map(list, stored)])[1:-1]}"
                     for name, stored in shapes.items()
                     if name in state and sum(map(math.prod, stored)) != math.prod(state[name])]
        if problems:
            raise QuantizeError("\n".join([f"{self.path}: does not fill {own.model_class}", *problems]))
        assemblies = {}
        for name, own_parts in parts.items():
            rule = own.rule(name)
            assert rule is not None                              # those without one are unknown
            rows = math.prod(state[name][:-1]) if len(state[name]) > 1 else state[name][0]
            counts = source_rows(rule, config, rows) if is_row_wise(rule) else [0] * len(rule.sources)
            for place, source in enumerate(rule.sources):
                first = sum(counts[:place])
                assemblies[source] = Assembly(own_parts, state[name], rule, place, first, first + counts[place])
        return assemblies

    def _parts(self, names: Conversions, own: GgufMap) -> tuple[dict[str, tuple[str, ...]], list[str]]:
        """The folder's tensors by model parameter, and the tensors that no parameter takes."""
        stored = [name for name in self.folder.names() if not name.endswith(UNUSED)]
        targets = {name: names.target(name) for name in stored}
        joined = {name.removesuffix(".weight"): self.folder.entry(name).shape for name in stored if targets[name][1] is not None}
        try:
            stacks = names.stacks(joined)
        except LoadError as error:
            raise QuantizeError(f"{self.path}: {error}") from error
        parts = {target: tuple(f"{layer}.weight" for expert in stack for layer in expert) for target, stack in stacks.items()}
        parts |= {target: (name,) for name, (target, pattern) in targets.items() if pattern is None}
        unknown = [name for target in parts if target not in names.tensors or own.rule(target) is None for name in parts[target]]
        return parts, unknown

    def _shapes(self, assembly: Assembly) -> list[tuple[int, ...]]:
        """The shapes of all source tensors of a rule."""
        meta = torch.empty(assembly.shape, dtype=torch.uint8, device="meta")
        return [tuple(tensor.shape) for tensor in source_tensors(assembly.rule, meta, self.axes)]

    def _type(self, name: str, rank: int, parts: Sequence[str]) -> str:
        """The type of a tensor in the converter's file, where matrices keep that of the folder."""
        stored = {self.folder.entry(part).dtype for part in parts}
        if wrong := sorted(stored - set(FLOATS)):
            raise QuantizeError(f"{self.path}: tensor {shown(parts[0])}: {wrong[0]} is not quantized")
        is_plain = rank < 2 or name.endswith(("_norm.weight", *FLOAT32)) or not name.endswith(".weight")
        return "F32" if is_plain or len(stored) > 1 else stored.pop()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        shape = self.tensors[name].shape
        if name in self.generated:
            return self.generated[name].view(-1, shape[-1])[start:stop]
        assembly = self.assemblies[name]
        if not is_row_wise(assembly.rule):
            return self._cached(name, assembly).reshape(-1, shape[-1])[start:stop]
        columns = shape[-1] if len(shape) > 1 else 1             # a vector is one row of the file, and rows of single elements
        scale = shape[-1] // columns
        first, last = assembly.first + start * scale, min(assembly.first + stop * scale, assembly.last)
        if len(assembly.parts) == 1 and not assembly.rule.rows:
            return self.folder.numbers(assembly.parts[0], first * columns, last * columns).view(-1, shape[-1])
        order = self._cached(name, assembly)[first:last] if assembly.rule.rows else torch.arange(first, last, device="cpu")
        return self._gathered(assembly.parts, order, columns).view(-1, shape[-1])

    def _cached(self, name: str, assembly: Assembly) -> Tensor:
        """The row order of all sources, or the tensor for a rule that does not work by rows; the last one is cached."""
        if name not in self._cache:
            rule, shape = assembly.rule, assembly.shape
            if is_row_wise(rule):
                count = math.prod(shape[:-1]) if len(shape) > 1 else shape[0]
                self._cache = {name: torch.argsort(row_order(rule.rows, self.axes, count))}
            else:
                whole = self._gathered(assembly.parts, torch.arange(math.prod(shape), device="cpu"), 1).view(shape)
                self._cache = {name: source_tensors(rule, whole.float(), self.axes)[assembly.place]}
        return self._cache[name]

    def _gathered(self, parts: Sequence[str], order: Tensor, columns: int) -> Tensor:
        """Rows of concatenated tensors of the folder, in an order."""
        entries = [self.folder.entry(part) for part in parts]
        counts = torch.tensor([math.prod(entry.shape) // columns for entry in entries], dtype=torch.int64, device="cpu")
        ends = counts.cumsum(0)
        owners = torch.searchsorted(ends, order, right=True)
        dtypes = {torch_dtypes()[entry.dtype] for entry in entries}
        result = torch.empty(len(order), columns, dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32, device="cpu")
        for owner in sorted(set(owners.tolist())):
            own = owners == owner
            places = order[own] - (ends[owner] - counts[owner])
            first, last = int(places.min()), int(places.max()) + 1
            rows = self.folder.numbers(parts[owner], first * columns, last * columns).view(-1, columns)
            result[own] = rows[places - first].to(result.dtype)
        return result

    def stored(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor in the type that it has in an unquantized GGUF file."""
        rows = self.rows(name, start, stop)
        return rows.float() if self.tensors[name].type == "F32" else rows

    def ranges(self, name: str) -> list[Range]:
        """The ranges of files that a tensor is made of; none for one that the config says."""
        return [self.folder.range(part) for part in self.assemblies[name].parts] if name in self.assemblies else []

    def choices(self, options: mixes.Options) -> dict[str, mixes.Choice]:
        if options.mix.default is None:
            raise QuantizeError(f"{self.path}: only GGUF files are copied; give BF16 or F16 as the type")
        return mixes.choose(model_of(self.metadata, self.path), self.tensors.values(), options)

    # -- metadata -----------------------------------------------------------------------------------------------------

    def _metadata(self, config: Mapping[str, Any], own: GgufMap, settings: Mapping[str, Any]) -> dict[str, Value]:
        writer = gguf.GGUFWriter(path=None, arch=own.architecture)
        for name, tensor in self.tensors.items():
            writer.tensors[0][name] = gguf.gguf_writer.TensorInfo(tensor.shape, gguf.GGMLQuantizationType.F32, 0)
        total, shared, experts, count = writer.get_total_parameter_count()
        general = gguf.Metadata.load(None, self.path.resolve(), None, total)
        general.name = general.name or self.path.resolve().name
        if general.sampling_penalty_repeat is None:              # a name that the package gguf does not know yet
            general.sampling_penalty_repeat = json_of(self.path / "generation_config.json").get("repetition_penalty")
        general.size_label = general.size_label or gguf.size_label(total, shared, experts, count)
        writer.add_type(gguf.GGUFType.MODEL)
        general.set_gguf_meta_model(writer)
        for key, (type, *names) in {**settings["common"], **settings.get("settings", {})}.items():
            if (value := _entry(config, names)) is not None:
                kind = gguf.GGUFValueType.UINT32 if type == "u32" else gguf.GGUFValueType.FLOAT32
                writer.add_key_value(f"{own.architecture}.{key}", value, kind)
        for key, (type, value) in _scaling(config, own, self.path).items():
            writer.add_key_value(f"{own.architecture}.rope.{key}", value, gguf.GGUFValueType[type])
        add_vocabulary(writer, self.path, settings["vocabulary"], config)
        metadata: dict[str, Value] = {}
        for key, entry in writer.kv_data[0].items():
            try:
                metadata[key] = _value(entry)
            except CheckpointError as error:
                raise QuantizeError(f"{self.path}: {key}: {error}") from None
        return metadata


def _entry(config: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The first of some entries that a config has; for 'a/b' the quotient of two entries, where that is None."""
    value = next((config[name] for name in names if name in config), None)
    quotient = next((name.split("/") for name in names if "/" in name), None)
    return config[quotient[0]] // config[quotient[1]] if value is None and quotient else value


def _scaling(config: Mapping[str, Any], own: GgufMap, path: Path) -> dict[str, tuple[str, Any]]:
    """The settings of rotary embeddings.  Raises QuantizeError for an unsupported kind of scaling."""
    rope = config.get("rope_parameters") or {}
    kind, factor, theta = rope.get("rope_type", "default"), rope.get("factor"), rope.get("rope_theta", config.get("rope_theta"))
    result: dict[str, tuple[str, Any]] = {} if theta is None else {"freq_base": ("FLOAT32", theta)}
    if kind not in ("default", "linear", "yarn") and not (kind == "llama3" and FREQUENCIES in own.unused):
        raise QuantizeError(f"{path / 'config.json'}: rotary embeddings of type {kind!r} are not written to a GGUF file")
    if kind in ("linear", "yarn") and factor is not None:
        result |= {"scaling.type": ("STRING", kind), "scaling.factor": ("FLOAT32", factor)}
    if kind == "yarn" and factor is not None:
        length = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
        if length is None:
            raise QuantizeError(f"{path / 'config.json'}: yarn has no original_max_position_embeddings")
        attention = rope.get("attention_factor", rope.get("attn_factor"))
        numbers = {"ext_factor": rope.get("extrapolation_factor"), "attn_factor": attention, "beta_fast": rope.get("beta_fast"),
                   "beta_slow": rope.get("beta_slow")}
        result["scaling.original_context_length"] = ("UINT32", length)
        result |= {f"scaling.yarn_{key}": ("FLOAT32", value) for key, value in numbers.items() if value is not None}
    return result


def _frequencies(config: Mapping[str, Any], own: GgufMap, path: Path) -> dict[str, Tensor]:
    """The divisors of the frequencies of rotary embeddings in Llama 3.1: float32 [head width / 2]; {} for other models."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3" or FREQUENCIES not in own.unused:
        return {}
    width = _entry(config, ["head_dim", "hidden_size/num_attention_heads"])
    base, factor, length = (rope.get(key, usual) for key, usual in (("rope_theta", 10000.0), ("factor", 8.0),
                                                                    ("original_max_position_embeddings", 8192)))
    low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    divisors: list[Any] = []
    for frequency in 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)):
        wavelength = 2 * math.pi / frequency
        smooth = (length / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1 if wavelength < length / high else factor if wavelength > length / low else between)
    return {FREQUENCIES: torch.tensor(divisors, dtype=torch.float32, device="cpu")}


def _axes(config: Any, assemblies: Any) -> dict[str, int]:
    """The numbers of a config that rules refer to, and those of latent attention."""
    words = {word for assembly in assemblies for word in assembly.rule.rows.replace(":", "").replace("*", " ").split()}
    words |= {"num_attention_heads", "qk_nope_head_dim"}
    return {word: value for word in words if isinstance(value := getattr(config, word, None), int)}


def _value(entry: Any) -> Value:
    """The metadata value of a value of the package gguf."""
    if entry.type is not gguf.GGUFValueType.ARRAY:
        return Value.of(WORDS[entry.type], entry.value)
    element = entry.sub_type or gguf.GGUFValueType.get_type(entry.value[0])
    return Value.of(f"{WORDS[element]}[]", entry.value)

