"""A producer of quantized checkpoints as data: one file of specs/producers; docs/language/detection.md describes the keys.

A file describes the producer's configs.  It selects among the matchers and readers below and has no language of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from qdsl.core.places import check_regular
from qdsl.core.stored import INPUT_SCALE, Description
from qdsl.core.transforms import INPUT, KINDS, OUTPUT, Transform

# How a list's entries name modules; see checkpoint/detect/ignored.py.
DIALECTS = ("exact", "substring", "transformers", "regex", "glob", "regex_or_glob", "dynamic", "suffix", "tag")
# A producer's names for scales of stacked experts: 'down_proj_scale', 'down_proj_weight_scale', or none.
EXPERT_NAMES = ("short", "full", "none")
Dialect = Annotated[str, DIALECTS]
NULL = "null"                                                    # in a rule: the setting is absent
# Keys of a rule that are not settings.
ABOUT_RULE = ("storage", "where", "fixed", "with", "preferred", "quantize", "experts", "producer")
WORDS = ("strategy",)                                            # never a parameter's value, though one is called 'group'
INLINE = "*"                                                     # in `layers`: settings are stored under the layers' own names
CONFIG_FILE = "config.json"

Rule = dict[str, Any]
Reader = Callable[[Any, str], Any]                              # of a value, and its key for messages


class ProducerError(ValueError):
    """An invalid file of a producer.  The message names the file and the key."""


@dataclass(frozen=True, slots=True)
class SettingsPlace:
    """A place of settings that need not name their producer: a file, and the keys that lead to them.

    first: it is read before the `quantization_config` of config.json.  repeat: settings written to `quantization_config` are
    written there too, without quant_method.
    """

    file: str
    at: tuple[str, ...] = ()
    first: bool = False
    repeat: bool = False


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """How to read a map from layers to their settings.

    complete: layers that it does not name are unquantized.  plain: settings whose values mark a layer as unquantized.  alone: a
    layer's settings take none of the whole checkpoint's.  searched: names that no layer has are regular expressions, found
    anywhere in a layer's name, after all other names.
    """

    complete: bool = False
    plain: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    alone: bool = False
    searched: bool = False


@dataclass(frozen=True, slots=True)
class PatternSettings:
    """How to read a map from patterns to settings.

    under: the setting that they replace, '' if they are several.  whole: keys of the map that are settings of all layers, and no
    patterns.  complete: where there are patterns, layers that none names are unquantized.
    """

    dialect: Dialect
    under: str = ""
    whole: tuple[str, ...] = ()
    complete: bool = False


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How to read and write settings of groups of layers.

    key: the setting with the groups.  weights: the settings of a group's weights.  targets: the dialect of a group's list of
    layers.  every: the module class that means all layers.  embeddings: the class of embeddings.  name: of the single group that
    is written.  defaults: further settings of a written group, unless a rule sets them.  repeated: global settings that a written
    group repeats.  presets: by name in capital letters, settings of a group that is a list of targets.
    """

    key: str
    weights: tuple[str, ...]
    targets: Dialect
    every: str
    name: str
    embeddings: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    repeated: tuple[str, ...] = ()
    presets: Mapping[str, Annotated[Any, _any]] = field(default_factory=dict)

    def expand_presets(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings with the objects that presets stand for, in place of lists of targets under their names."""
        groups: Any = settings.get(self.key)
        presets = {name: {**self.presets[name.upper()], "targets": own} for name, own in groups.items()
                   if isinstance(own, list) and name.upper() in self.presets} if isinstance(groups, Mapping) else {}
        return {**settings, self.key: {**groups, **presets}} if presets else {**settings}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Settings that a program does not load.  when: settings and values; why: the reason, '' to name the first of them.

    removes: the readers that it excludes, by their names in `readers`.  uneven: the setting with the extents of blocks; loads
    fail only where some weight has several blocks along N or K, and the last is a part of one.
    """

    program: str
    when: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    uneven: str = ""
    why: str = ""
    removes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Readers:
    """The programs that load a producer's settings.  diffusers: those for diffusers models.  notes: why other programs do not."""

    programs: tuple[str, ...] = ()
    diffusers: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    refuses: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class DiffusersSettings:
    """What a producer's settings have in models of diffusers instead: lists of unquantized layers, and further settings."""

    skipped: Mapping[str, tuple[Dialect, ...]]
    written: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Header:
    """A producer's metadata about weights in safetensors headers; '' for what it does not write.

    weights: the key that lists all weights, each with JSON under its name.  plain: the JSON of an unquantized weight.  layers:
    the key with JSON of all layers.  tensor: the module's tensor with its JSON.  prefixes: starts of names that `layers` may
    omit.  marker: a tensor whose presence means that 8-bit floats have scales.
    """

    weights: str = ""
    plain: Mapping[str, Any] = field(default_factory=dict)
    layers: str = ""
    tensor: str = ""
    prefixes: tuple[Annotated[str, _any], ...] = ("",)
    marker: str = ""


@dataclass(frozen=True, slots=True)
class TransformRule:
    """How a producer states a transform of a layer's input (qdsl/core/transforms.py).

    kind, normalized, transposed, dtype: of the transform.  tensor: its name after the layer's, which states the transform by
    itself.  optional: the settings state it, and the tensor may be missing.  siblings: ends of the names of the layers that take
    a tensor of their parent module.  when: settings and their values.  size: the setting with the size of blocks, or the name of
    a tensor of one number.  eps: the setting with that of a norm.  repeats: tensors of one number that state nothing else.
    listed: the setting with the names of layers that share a tensor of the checkpoint, whose name `tensor` and the size end.
    based: a matrix without a tensor may have a base; one of all columns is then transposed.
    """

    kind: Annotated[str, KINDS]
    tensor: str = ""
    optional: bool = False
    siblings: tuple[str, ...] = ()
    when: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    size: str = ""
    normalized: bool = False
    transposed: bool = False
    dtype: Annotated[str, _any] = "float32"
    eps: str = ""
    repeats: tuple[str, ...] = ()
    listed: str = ""
    based: bool = False


@dataclass(frozen=True, slots=True)
class TransformSchemes:
    """Settings with schemes of transforms, each for lists of modules, as compressed-tensors has them.

    key: the setting, and `groups`, the key in it.  targets, every: as in GroupSettings.  types: of schemes -> those that are
    built without a tensor, 'built', those of a stored matrix of ones, 'ones', and those of a stored matrix, 'matrix'.
    sides: locations -> 'input' or 'output'.  fused: locations that are parts of weights.  pairs: locations whose transforms
    cancel, if both have one.
    """

    key: str
    groups: str
    targets: Dialect
    every: str
    types: Mapping[str, Annotated[str, ("built", "ones", "matrix")]]
    sides: Mapping[str, Annotated[str, (INPUT, OUTPUT)]]
    fused: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NeighborTensors:
    """Tensors next to weights, by patterns of whole names.

    used: qdsl computes with them.  inert: no number of a model depends on them.  coarser: they are for x or caches in few bits.
    rounding: by format, last parts of names of those by which programs round decoded weights in products.
    acts: they change what a model computes, which qdsl does not compute -> what they change.
    """

    used: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()
    coarser: tuple[str, ...] = ()
    rounding: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    acts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProgramNeeds:
    """What a program needs of a folder besides weights and settings: keys of config.json, and one of some files.

    name: of what the files are, for messages.
    """

    config: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    name: str = "file"


@dataclass(frozen=True, slots=True)
class ShorterWords:
    """Tensors whose words of 32 bits may be stored as shorter integers, of which several have the same bits in the same order.

    setting: names their type.  axes: by format, storage and tensor, the axis along which integers follow each other.
    """

    setting: str
    axes: Mapping[str, Mapping[str, Mapping[str, Annotated[int, _any]]]]


@dataclass(frozen=True, slots=True)
class Producer:
    """The description of one producer's checkpoints.

    name: the quant_method of its settings.  methods: other quant_methods whose settings are read the same way.  unnamed: sets of
    settings that identify its configs without quant_method.  settings: its names -> names in rules.  accepts: the block lengths
    that its own code accepts, by setting; 'any' is every positive one.  skipped: lists of unquantized layers, and their
    dialects, several if readers differ; the first list is written.  copied_skips: lists that are written with the same
    entries.  diffusers: what is written instead in models of diffusers.  skipped_patterns: the map of patterns that it uses
    instead.  plain_by_default: ends of names that need not be listed there.  only: lists of the only quantized layers.
    written: further settings to write.  follows_tensors: readers require exactly the tensors that settings mention.  experts:
    one of EXPERT_NAMES.  formats: rules for settings by format.  headers: rules for a header's JSON by format.  tensors: by
    format and storage, the storage's tensors -> the ends of their names in checkpoints.  transforms, schemes: how transforms of
    x are stated.  shorter: tensors that may have shorter integers.

    Settings that no other key of the file names, with dots for nested ones: used, settings that qdsl reads or that repeat what
    tensors say.  inert: no number of a model depends on them.  coarser: x or caches in few bits, where qdsl computes in more.
    acts: they change what a model computes, which qdsl does not compute -> what they change.  transformed: those that do not act
    where layers have transforms.  usual: values that change nothing.  open: objects to which each release adds settings, '*' for
    the settings themselves.  tagged: objects whose settings may lie under names of layers.  neighbors: tensors.  common: whether
    the settings of all producers may have these.  unread: quant_methods without a file -> what their weights are.
    transposed_modules: by model type, last names of modules whose weights are [K, N].  needs: what programs need of a folder, by
    the beginnings of their names.
    """

    name: str
    methods: tuple[str, ...] = ()
    unnamed: tuple[tuple[str, ...], ...] = ()
    places: tuple[SettingsPlace, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    accepts: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    skipped: Mapping[str, tuple[Dialect, ...]] = field(default_factory=dict)
    copied_skips: tuple[str, ...] = ()
    diffusers: DiffusersSettings | None = None
    skipped_patterns: str = ""
    plain_by_default: tuple[str, ...] = ()
    layers: Mapping[str, LayerSettings] = field(default_factory=dict)
    patterns: Mapping[str, PatternSettings] = field(default_factory=dict)
    only: Mapping[str, Dialect] = field(default_factory=dict)
    groups: GroupSettings | None = None
    written: Mapping[str, Any] = field(default_factory=dict)
    follows_tensors: bool = False
    experts: Annotated[str, EXPERT_NAMES] = "short"
    readers: Readers = field(default_factory=Readers)
    header: Header | None = None
    formats: Mapping[str, Sequence[Annotated[Rule, _read_rule]]] = field(default_factory=dict)
    headers: Mapping[str, Sequence[Annotated[Rule, _read_rule]]] = field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)
    transforms: tuple[TransformRule, ...] = ()
    schemes: TransformSchemes | None = None
    shorter: ShorterWords | None = None
    used: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()
    coarser: tuple[str, ...] = ()
    acts: Mapping[str, str] = field(default_factory=dict)
    transformed: tuple[str, ...] = ()
    usual: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    open: tuple[str, ...] = ()
    tagged: tuple[str, ...] = ()
    neighbors: NeighborTensors = field(default_factory=NeighborTensors)
    common: bool = False
    unread: Mapping[str, str] = field(default_factory=dict)
    transposed_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs: Mapping[str, ProgramNeeds] = field(default_factory=dict)

    @property
    def skip_list(self) -> str:
        """The list of unquantized layers that is written, '' for none."""
        return next(iter(self.skipped), "")

    def states(self, transform: Transform) -> bool:
        """Whether its own readers know a transform by the tensor alone."""
        return any(rule.kind == transform.kind and not rule.when and transform.tensor.endswith(f".{rule.tensor}")
                   for rule in self.transforms if rule.tensor and not rule.listed)

    @property
    def of_diffusers(self) -> Producer:
        """The same producer as it describes models of diffusers."""
        own = self.diffusers
        return self if own is None else replace(self, skipped=own.skipped, copied_skips=(), written=own.written)


def _word(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise ProducerError(f"{key}: expected a word, not {value!r}")
    return value


def _flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise ProducerError(f"{key}: expected true or false, not {value!r}")
    return value


def _any(value: Any, key: str) -> Any:
    return value


def _mapping_of(read: Reader) -> Callable[[Any, str], dict[str, Any]]:
    def mapping(value: Any, key: str) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ProducerError(f"{key}: expected a mapping, not {value!r}")
        return {name: read(content, f"{key}.{name}") for name, content in value.items()}
    return mapping


def _list_of(read: Reader) -> Callable[[Any, str], tuple[Any, ...]]:
    def listed(value: Any, key: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise ProducerError(f"{key}: expected a list, not {value!r}")
        return tuple(read(content, f"{key}[{number}]") for number, content in enumerate(value))
    return listed


def _one_of(words: Sequence[str]) -> Callable[[Any, str], str]:
    def word(value: Any, key: str) -> str:
        if value not in words:
            raise ProducerError(f"{key}: expected one of {', '.join(words)}, not {value!r}")
        return str(value)
    return word


def _reader(type: Any) -> Reader:
    """The function that reads a value of a type.  Annotated types state the words that are allowed, or that function."""
    origin, arguments = get_origin(type), get_args(type)
    if origin is Annotated:
        return arguments[1] if callable(arguments[1]) else _one_of(arguments[1])
    if origin in (tuple, Sequence):
        return _list_of(_reader(arguments[0]))
    if origin is Mapping:
        return _mapping_of(_reader(arguments[1]))
    if origin is UnionType and NoneType in arguments:
        return _reader(arguments[0])
    return {str: _word, bool: _flag, Any: _any, int | str: _any}.get(type) or _dataclass_reader(type)


@cache
def _dataclass_reader(kind: Any) -> Reader:
    """The function that reads a dataclass; fields without a default are needed."""
    hints = get_type_hints(kind, include_extras=True)
    keys = {own.name: _reader(hints[own.name]) for own in fields(kind)}
    needed = [own.name for own in fields(kind) if own.default is own.default_factory is MISSING]

    def record(value: Any, key: str) -> Any:
        contents = _mapping_of(_any)(value, key)
        for name in contents:
            if name not in keys:
                raise ProducerError(f"{key}: unknown key '{name}'; known are {', '.join(keys)}")
        for name in needed:
            if name not in contents:
                raise ProducerError(f"{key}: '{name}' is missing")
        return kind(**{name: keys[name](content, f"{key}.{name}".lstrip(".")) for name, content in contents.items()})
    return record


def _read_rule(value: Any, key: str) -> Rule:
    """A rule with YAML nulls replaced by the word 'null'."""
    rule: Rule = _with_null_words(_mapping_of(_any)(value, key))
    for name in ("where", "fixed", "with", "quantize"):
        if not isinstance(rule.get(name, {}), Mapping):
            raise ProducerError(f"{key}: '{name}' is a mapping")
    for name, wanted in rule.items():
        if name not in ABOUT_RULE and isinstance(wanted, Mapping):
            words = [*wanted.values()]
            if len(words) != 1 or not isinstance(words[0], list) or len(words[0]) != 2:
                raise ProducerError(f"{key}.{name}: expected {{NAME: [word where it is there, word where it is not]}}")
    return rule


def _with_null_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_null_words(content) for key, content in value.items()}
    if isinstance(value, list):
        return [_with_null_words(content) for content in value]
    if isinstance(value, float):
        raise ProducerError(f"a rule has words, integers and booleans, not {value}")
    return NULL if value is None else value


def producer_of(data: Any, source: str) -> Producer:
    """A producer from its file's data.  Raises ProducerError, which names the source and the key."""
    try:
        producer: Producer = _dataclass_reader(Producer)(
            {("name" if key == "producer" else key): value for key, value in _mapping_of(_any)(data, "the file").items()}, "")
    except ProducerError as error:
        raise ProducerError(f"{source}: {str(error).lstrip(': ')}") from None
    return producer


def read_yaml(path: Path) -> Any:
    """The data of a producer's YAML file.  Raises ProducerError for invalid YAML and duplicate keys."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # a class that the machine decides
        """YAML without two values for one key."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            if twice := next((key for key in keys if keys.count(key) > 1), None):
                raise ProducerError(f"{path}: '{twice}' stands twice in one mapping")
            return dict(super().construct_mapping(node, deep))

    try:
        return yaml.load(check_regular(path).read_text(), Loader)  # noqa: S506 - Loader is a SafeLoader
    except yaml.YAMLError as error:
        raise ProducerError(f"{path}: {error}") from None


def check_references(producer: Producer, formats: Sequence[Description]) -> None:
    """Raises ProducerError if a producer names unknown formats, storages, parameters or tensors."""
    shipped = {format.name: format for format in formats}
    for key, by_format in {"formats": producer.formats, "headers": producer.headers}.items():
        for name, rule in [(name, rule) for name, rules in by_format.items() for rule in rules]:
            if problem := _rule_problem(shipped.get(name), rule):
                raise ProducerError(f"{producer.name}: {key}.{name}: {problem}")
    for name, storages in producer.tensors.items():
        for storage, names in storages.items():
            tensors = _tensors(shipped[name], storage) if name in shipped else {}
            if unknown := [tensor for tensor in names if tensor not in tensors]:
                raise ProducerError(f"{producer.name}: tensors.{name}.{storage}: there is no tensor '{unknown[0]}'")


def _rule_problem(format: Description | None, rule: Rule) -> str:
    """The error of a rule about a format; '' if there is none."""
    if format is None:
        return "there is no such format"
    if rule.get("storage", "") not in ("", *format.storages):
        return f"there is no storage '{rule['storage']}'"
    for name, value in rule.get("where", {}).items():
        if value not in format.params.get(name, ()):
            return f"there is no parameter '{name}' with the value {value}"
    fields = {INPUT_SCALE, *format.spared, *(name for name, _ in format.tensors)}
    sources = [name for key, wanted in rule.items() if key not in ABOUT_RULE and isinstance(wanted, Mapping) for name in wanted]
    unknown = next((name for name in sources if name not in fields), None)
    return f"there is no tensor or optional field '{unknown}'" if unknown else ""


def _tensors(format: Description, storage: str) -> Mapping[str, Any]:
    """The tensors of a storage, those of all variants."""
    return {name: stored for storages in format.variants.values() for name, stored in storages.get(storage, {}).items()}
