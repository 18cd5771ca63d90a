"""Which layers of a checkpoint are quantized, and how: by their tensors first, by its config where those leave something open.

A module is quantized if the tensors of some storage are there.  Their dtypes and shapes decide format, storage and parameters
as `wrap` decides them; settings choose among what fits, and what they say otherwise is a contradiction.  Nothing imports torch.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.groups import Group, groups
from qdsl.checkpoint.detect.header_claims import LAYER, Stated, flat
from qdsl.checkpoint.detect.quantization import Quantization, Scheme, quantizations
from qdsl.checkpoint.detect.rules import EXPERTS, EXTENTS, OWN, Reading, from_tensors, is_block, own_rule, readings, same
from qdsl.checkpoint.detect.tensor_names import Leaves
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import START_BYTES, CheckpointError, shown, strict_json, torch_name
from qdsl.core.overflowed_zeros import OVERFLOWED_ZEROS, has_overflowed_zeros
from qdsl.core.shapes import granule
from qdsl.core.stored import (
    NO_SHAPE,
    OF_X,
    Description,
    Fit,
    LayoutMismatch,
    TensorInfo,
    element_dtype,
    fits,
    named,
    resolve_default,
)

ENOUGH = 64                                                      # elements in which nothing is no chance
LISTED = 1 << 10                                                 # bytes of a tensor of numbers that says something
TOLD = 100                                                       # how near a miss comes that a tensor itself tells of
UNKNOWN = -1                                                     # and one whose format is not the one that a header speaks of
TURNED = "experts' weights are [E, K, N], as their extents tell"
NUMBERS = {"I64": "q", "I32": "i", "U8": "B", "I8": "b", "F32": "f"}
WIDE = {"float16": 2, "bfloat16": 2, "float32": 4}               # bytes of numbers that bytes may be held in
BYTES = ("U8", "I8")                                             # dtypes of weights of which two may lie in an element
# Tensors of layers of many formats that are no part of the weight.
BESIDE = ("bias", "input_scale", "output_scale", "input_global_scale", "input_zero_point", *OF_X)
NOT_KNOWN = "quantized in a way that is not known"
PLAIN = {"float16", "bfloat16", "float32", "float64", "int64", "bool"}       # dtypes of weights and buffers that are not coded
FLOAT8 = {"float8_e4m3fn", "float8_e5m2"}                        # and those that are plain in a cast of a model, without scales
MARKER = "scaled_fp8"                                            # a tensor by which ComfyUI knows FP8 files with scales


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that is quantized, or that has tensors of one that is and is none.

    tensors: those of the storage, by its own names for them -> their names in the checkpoint.  numbers: those of one number
    that JSON beside the weight says.  shape: (N, K); experts: how many
    such weights lie one after the other along a first axis of every tensor, None without that axis.  settings: tensors that
    say no more than the fields above do.  others: tensors of the module besides, by the last parts of their names: bias, scales
    of activations.  by: the config's rule or group for the layer.  problems: what its files say otherwise.
    why: the reason why it is not recognised; format and storage are '' then.  turned: tensors of three axes have the last two
    in the other order than the storage, as experts' weights [E, K, N].  act_order: columns belong to groups all over K; False
    unless `qdsl.checkpoint.report.shards.with_order` has read the index.
    """

    name: str
    format: str = ""
    storage: str = ""
    params: Mapping[str, int | str] = field(default_factory=dict)
    shape: tuple[int, int] = (0, 0)
    experts: int | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    by: str = ""
    problems: tuple[str, ...] = ()
    why: str = ""
    turned: bool = False
    act_order: bool = False

    @property
    def is_unknown(self) -> bool:
        """Whether it is quantized as no format is."""
        return self.why.startswith(NOT_KNOWN)

    @property
    def lacks_shape(self) -> bool:
        """Whether its tensors do not say what N and K are."""
        return self.why.endswith(NO_SHAPE)

    @property
    def stacked(self) -> bool:
        """Whether the name is that of a weight and not of its module, as experts in one tensor have it."""
        begin = f"{self.name}." if self.name else ""
        return not all(full.startswith(begin) for full in (*self.tensors.values(), *self.others.values()))


@dataclass(frozen=True, slots=True)
class Left:
    """A module whose weight is a plain matrix.  by: the config's rule for that; problem: what speaks against it."""

    name: str
    by: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Layers:
    """A checkpoint's layers that are quantized, and all other tensors, in the order of the files.

    left: modules whose weights are plain matrices.  problems: what is wrong with no single layer.  groups: weights that are held
    together; their tensors are among the others.
    """

    layers: list[Layer]
    plain: list[str]
    left: list[Left]
    quantizations: list[Quantization]
    problems: list[str]
    groups: list[Group]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One way to read a module's tensors."""

    format: Description
    fit: Fit
    experts: int | None

    @property
    def has_scale(self) -> bool:
        """Whether no scale is left out, without which weights are plain casts."""
        layout = self.format.layout(self.fit.storage, self.fit.params)
        return not any(stored.optional and stored.dtype in self.format.params and name not in self.fit.tensors
                       for name, stored in layout.items())

    @property
    def label(self) -> str:
        return f"{self.format.name}.{self.fit.storage}" + "".join(f" {key}={value}" for key, value in self.fit.params.items())


def layers(folder: Folder, formats: Sequence[Description] | None = None, shapes: Mapping[str, Sequence[int]] | None = None,
           ) -> Layers:
    """The layers of a folder, by the formats that ship or those given.

    shapes: (N, K), or (E, N, K) of experts, by the names of modules; used where tensors do not state it, as padded ones do not.
    Raises CheckpointError where a file that says settings is none.  What is wrong with a layer is in it.
    """
    known = [each for each in (descriptions() if formats is None else formats)
             if not {"safetensors", "parts"} & each.detect.keys()]                       # plain floats, and groups (groups.py)
    found = quantizations(folder)
    return _Finder(folder, known, found, shapes or {}).layers()


class _Finder:
    def __init__(self, folder: Folder, formats: Sequence[Description], found: Sequence[Quantization],
                 shapes: Mapping[str, Sequence[int]]) -> None:
        self.folder = folder
        self.shapes = shapes
        self.formats = formats
        self.found = list(found)
        self.says = found[0] if found else None
        self.together = groups(folder)
        self.stated = Stated(folder)
        self.leaves = Leaves(formats, self.stated)
        self.shapes_said = {leaf for each in formats for storages in each.variants.values() for layout in storages.values()
                            for leaf, stored in layout.items() if stored.dtype == "shape"}
        self.saying: dict[str, object] = dict.fromkeys(self.shapes_said)
        self.saying |= {leaf: rule for each in formats for leaf, rule in each.detect.get("tensors", {}).items()}
        self.is_scaled = any(name.rpartition(".")[2] == MARKER for name in folder.names())
        self.agreeing: dict[tuple[int, int], tuple[Sequence[_Candidate], Mapping[str, Any],
                                                   tuple[list[_Candidate], list[_Candidate]]]] = {}
        self.fitting: dict[tuple[object, ...], list[_Candidate] | LayoutMismatch] = {}

    def layers(self) -> Layers:
        inside = {full for each in self.together for full in each.tensors.values()}
        modules = self.leaves.modules(name for name in [*self.folder.names(), *self.folder.missing] if name not in inside)
        found = {name: self._layer(name, tensors) for name, tensors in modules.items()}
        found |= {name: self._layer(name, modules[name], turned=True) for name in self._turned(found)}
        used = {self._kind(leaf, modules[name][leaf]) for name, layer in found.items() if layer is not None
                for leaf in modules[name] if modules[name][leaf] in layer.tensors.values()}
        layers = {name: layer or self._remains(name, modules[name], used) for name, layer in found.items()}
        if self.says is not None and self.says.method not in ("", OWN) and not any(layers.values()):
            layers = {name: self._unnamed(name, tensors) for name, tensors in modules.items()}
        kept = {name: layer for name, layer in layers.items() if layer is not None}
        held = {full for layer in kept.values() for full in (*layer.tensors.values(), *layer.settings, *layer.others.values())}
        plain = [name for name in self.folder.names() if name not in held]
        left = self._left({name: tensors for name, tensors in modules.items() if name not in kept}, kept)
        return Layers(list(kept.values()), plain, left, self.found, self._problems(kept, modules), self.together)

    def _layer(self, name: str, tensors: Mapping[str, str], turned: bool = False) -> Layer | None:
        """The module as a layer; None where it holds plain tensors alone.  turned: its tensors are [E, K, N]."""
        layer = self._layer_of(name, tensors, turned, ())
        if layer is not None and name in self.shapes and (layer.why or layer.shape != tuple(self.shapes[name])[-2:]):
            shaped = self._layer_of(name, tensors, turned, tuple(self.shapes[name]))
            layer = shaped if shaped is not None and (layer.why or not shaped.why) else layer
        return layer

    def _layer_of(self, name: str, tensors: Mapping[str, str], turned: bool, shape: tuple[int, ...]) -> Layer | None:
        """The same, by a shape that the caller knows; () for none."""
        there = {leaf: full for leaf, full in tensors.items() if full not in self.folder.missing}
        try:
            stated = self.stated.settings(name, there)
            candidates = self._candidates(there, stated, turned, shape, len(there) == len(tensors))
        except CheckpointError as error:                         # what should be JSON is none
            return Layer(name, others=there, why=str(error))
        if candidates is None:
            return None
        scheme = self.says.scheme(name) if self.says else Scheme({})
        if isinstance(candidates, LayoutMismatch):
            if candidates.reached == UNKNOWN:
                return Layer(name, others=there, by=scheme.by, why=self._lost(tensors) or self._unknown(there, stated))
            why = f"{TURNED}: {candidates}" if turned else str(candidates)
            return Layer(name, others=there, by=scheme.by, why=self._lost(tensors) or why)
        return replace(self._chosen(name, there, candidates, scheme), turned=turned)

    def _unknown(self, tensors: Mapping[str, str], stated: Mapping[str, Any] | None) -> str:
        """Why a layer is of no format: what a header states of it, or else what its tensors are."""
        entries = {leaf: self.folder.entry(full) for leaf, full in tensors.items()}
        shapes = ", ".join(f"{leaf} {entry.dtype} {list(entry.shape)}" for leaf, entry in entries.items())
        return f"{NOT_KNOWN}: {_told_of(stated) if stated else shapes}"

    def _remains(self, name: str, tensors: Mapping[str, str], used: Container[tuple[str, str, int]]) -> Layer | None:
        """A module that has tensors as quantized layers have, though it is none: a scale without codes."""
        there = {leaf: full for leaf, full in tensors.items() if full not in self.folder.missing}
        if not any(self._kind(leaf, full) in used for leaf, full in there.items()):
            return None
        return Layer(name, others=there, why=self._lost(tensors) or str(self._nearest(self._given(there), {}, None)))

    def _unnamed(self, name: str, tensors: Mapping[str, str]) -> Layer | None:
        """A module with coded matrices whose names no format knows, where settings say that layers are quantized."""
        there = {leaf: full for leaf, full in tensors.items() if full not in self.folder.missing}
        is_coded = any(given.dtype not in PLAIN and len(given.shape) > 1 for given in self._given(there).values())
        return Layer(name, others=there, why=self._unknown(there, None)) if is_coded else None

    def _turned(self, layers: Mapping[str, Layer | None]) -> set[str]:
        """Experts whose weights are [E, K, N], though their tensors may fit as [E, N, K].

        One of the two weights of a module gives what the other takes, and has twice the rows that the other has columns, for gate
        and up.
        """
        beside: dict[str, dict[str, tuple[int, int]]] = {}
        for name, layer in layers.items():
            if layer is not None and (extents := self._extents(layer)) is not None:
                beside.setdefault(name.rpartition(".")[0], {})[name] = extents
        return {name for each in beside.values() for one, (n, k) in each.items() for other, (m, j) in each.items()
                if n == j and k == 2 * m for name in (one, other)}

    def _extents(self, layer: Layer) -> tuple[int, int] | None:
        """N and K of experts; where they are of no format what their tensor has instead, two codes of K in a byte."""
        if layer.format:
            return None if layer.experts is None else layer.shape
        full = layer.others.get("weight", "")
        entry = self.folder.entry(full) if full else None
        if entry is None or len(entry.shape) != 3:
            return None
        return entry.shape[1] * (2 if entry.dtype in BYTES else 1), entry.shape[2]

    def _lost(self, tensors: Mapping[str, str]) -> str:
        """What of a module lies in files that are not there."""
        return "; ".join(f"'{leaf}' lies in {self.folder.missing[full]}, which is missing" for leaf, full in tensors.items()
                         if full in self.folder.missing)

    def _kind(self, leaf: str, full: str) -> tuple[str, str, int]:
        entry = self.folder.entry(full)
        return leaf, entry.dtype, len(entry.shape)

    # -- plain tensors ------------------------------------------------------------------------------------------------

    def _left(self, modules: Mapping[str, Mapping[str, str]], layers: Mapping[str, Layer]) -> list[Left]:
        """Modules with plain matrices; suspicious are those that no rule leaves alone, and whose like are quantized elsewhere."""
        quantized = {_alike(name) for name, layer in layers.items() if layer.format}
        found = []
        for name, tensors in modules.items():
            full = tensors.get("weight", "")
            if not full or full in self.folder.missing or len(self.folder.entry(full).shape) < 2:
                continue
            scheme = self.says.scheme(name) if self.says else Scheme({})
            problem = ""
            if scheme.settings is not None and self.says is not None and name in self.says.layers:
                problem = f"plain, though {self.says.source} has settings for it"
            elif scheme.settings is not None and self.says is not None and _alike(name) in quantized:
                problem = f"plain, though {self.says.source} has no rule for that, and others of its kind are quantized"
            found.append(Left(name, scheme.by if scheme.settings is None else "", problem))
        return found

    def _problems(self, layers: Mapping[str, Layer], modules: Collection[str]) -> list[str]:
        """What is wrong with no single layer.  modules: of all tensors, plain ones too."""
        problems = [problem for each in self.found for problem in each.problems]
        if self.says is not None and self.says.layers:
            there = {name[:end] for name in modules for end in (*(i for i, letter in enumerate(name) if letter == "."), None)}
            problems += [f"{self.says.source} has settings for {shown(name)}, of which there is no tensor"
                         for name in self.says.layers if name not in there]
        problems += self._misnamed(layers)
        if self.says is not None and not layers and not (self.together and self.says.method == OWN):
            problems.append(f"{self.says.source} says {_brief(self.says.settings)}, but no tensor is quantized")
        problems += [problem for each in self.found[1:] for problem in _differing(self.found[0], each)]
        shards = dict.fromkeys(self.folder.missing.values())
        return [*problems, *(f"{shard} is missing, with {list(self.folder.missing.values()).count(shard)} tensors"
                             for shard in shards)]

    def _misnamed(self, layers: Mapping[str, Layer]) -> list[str]:
        """The problem of qdsl's settings that state another format than all layers and groups, which need no settings, have."""
        if self.says is None or self.says.method != OWN or "format" not in self.says.settings:
            return []
        of_groups = {group.format for group in self.together}
        formats = {layer.format for layer in layers.values()} | of_groups
        unstated = {format.name for format in self.formats if _needs_no_settings(format)} | of_groups
        if not formats or not formats <= unstated or self.says.settings["format"] in formats:
            return []
        return [f"{self.says.source} says {_brief(self.says.settings)}; the tensors fit {' and '.join(sorted(formats))}"]

    # -- what fits ----------------------------------------------------------------------------------------------------

    def _candidates(self, tensors: Mapping[str, str], stated: Mapping[str, Any] | None, turned: bool, shape: tuple[int, ...],
                    is_complete: bool) -> list[_Candidate] | LayoutMismatch | None:
        """Every way to read a module's tensors, or why there is none; None where they are plain.

        8-bit floats without any scale are casts, unless settings or ComfyUI's marker state scales, or files are missing.
        """
        given = self._given(tensors)
        if turned:
            given = {leaf: replace(each, shape=(*each.shape[:1], *each.shape[:0:-1])) if len(each.shape) == 3 else each
                     for leaf, each in given.items()}
        coded = [tensor for leaf, tensor in given.items() if tensor.dtype not in PLAIN and leaf in self.leaves.names]
        is_cast = (self.says is None or self.says.method == OWN) and is_complete and bool(coded) \
            and coded[0].dtype in FLOAT8 and len({*given} & {*self.leaves.names, LAYER}) == 1
        if stated is None and (not coded or (is_cast and len(coded[0].shape) not in (2, 3))):
            return None
        contents = self._contents(tensors)
        given |= {leaf: replace(given[leaf], values=tuple(content)) for leaf, content in contents.items()
                  if isinstance(content, list)}
        key = (*sorted(given.items(), key=lambda item: item[0]),
               *((leaf, repr(_without_numbers(content))) for leaf, content in contents.items()), repr(stated), shape)
        if key not in self.fitting:
            candidates = self._ways(given, contents, stated, shape)
            scaled = [candidate for candidate in candidates if (is_cast and not self.is_scaled) or candidate.has_scale]
            nearest = None if scaled else self._nearest(given, contents, stated, shape)
            if candidates and nearest is not None and (stated is not None or (
                    nearest.reached == UNKNOWN and coded[0].dtype in FLOAT8)):
                nearest = LayoutMismatch(TOLD, f"{candidates[0].label} needs a scale; given are {', '.join(given)}")
            self.fitting[key] = nearest or scaled
        return self.fitting[key]

    def _contents(self, tensors: Mapping[str, str]) -> dict[str, Any]:
        """What small tensors say: a JSON object where a format's rule for them is one, else numbers.  Raises CheckpointError."""
        found: dict[str, Any] = {}
        for leaf, full in tensors.items():
            if leaf in self.saying:
                data, dtype = self.folder.file(full).start(full, START_BYTES), self.folder.entry(full).dtype
                if not data:                                     # known by its header alone
                    continue
                if isinstance(self.saying[leaf], Mapping):
                    where = f"{self.folder.file(full).path}: tensor {shown(full)}"
                    found[leaf] = strict_json(data, where, depth=8)
                    if not isinstance(found[leaf], Mapping):
                        raise CheckpointError(f"{where}: not a JSON object")
                elif dtype in NUMBERS and len(data) <= LISTED:
                    numbers = list(struct.unpack(f"<{len(data) // struct.calcsize(NUMBERS[dtype])}{NUMBERS[dtype]}", data))
                    found[leaf] = numbers[0] if len(numbers) == 1 else numbers
        return found

    def _given(self, tensors: Mapping[str, str]) -> dict[str, TensorInfo]:
        entries = {leaf: self.folder.entry(full) for leaf, full in tensors.items()}
        dtypes = {leaf: "I64" if leaf in self.shapes_said and entry.dtype == "I32" else entry.dtype
                  for leaf, entry in entries.items()}
        return {leaf: TensorInfo(torch_name(dtypes[leaf]), entry.shape) for leaf, entry in entries.items()}

    def _ways(self, given: Mapping[str, TensorInfo], contents: Mapping[str, Any], stated: Mapping[str, Any] | None,
              shape: tuple[int, ...]) -> list[_Candidate]:
        """All formats' ways, or those that a tensor of settings or a header speaks of."""
        found: list[_Candidate] = []
        for format in self.formats:
            with suppress(LayoutMismatch):
                found += _ways(format, given, contents, stated, shape)
        return [each for each in found if contents.keys() & each.format.detect.get("tensors", {}).keys()] or found

    def _nearest(self, given: Mapping[str, TensorInfo], contents: Mapping[str, Any], stated: Mapping[str, Any] | None,
                 shape: tuple[int, ...] = ()) -> LayoutMismatch:
        """Why tensors are of no format, by the nearest of those that settings, a header or the tensors' names speak of."""
        misses: list[tuple[bool, bool, int, int, LayoutMismatch]] = []
        spoken = [] if self.says is None else [self.says.settings, *(group.settings for group in self.says.groups)]
        is_stated = self.says is not None and self.says.method not in ("", OWN)
        for format in self.formats:
            try:
                _ways(format, given, contents, stated, shape)
            except LayoutMismatch as miss:
                rules = format.detect.get("tensors", {})
                told = bool(contents) and contents.keys() <= rules.keys() and from_tensors(format, contents) is not None
                nearness = _nearness(format, given)
                says = any(True for each in spoken for _ in readings(format.detect.get("config"), list(format.params), each))
                if stated is None and not says and (is_stated or not _has_names(format, given)):
                    continue
                misses.append((told, nearness > 0, miss.reached, nearness, miss))
        return max(misses, key=lambda each: each[:4], default=(False, False, 0, 0, LayoutMismatch(UNKNOWN, NOT_KNOWN)))[4]

    # -- what settings say --------------------------------------------------------------------------------------------

    def _chosen(self, name: str, tensors: Mapping[str, str], candidates: Sequence[_Candidate], scheme: Scheme) -> Layer:
        """The one way to read a layer that its settings leave, else the reason why there are several."""
        settings = scheme.settings if scheme.settings is not None else self.says.settings if self.says else {}
        strong, weak = self._agreeing(candidates, settings)
        telling = [each for each in candidates if self._tells(each, tensors)]
        said = settings and any(self._is_spoken_of(each, settings) for each in candidates)
        denied = said and not strong and not weak
        problems: list[str] = []
        if strong and telling and not any(each in strong for each in telling):
            problems.append(f"{self.says.source if self.says else ''} says {strong[0].label}, but its words are those of "
                            f"{telling[0].label}")
        alike = [each for each in telling if not weak or any(each.fit.params == other.fit.params for other in weak)]
        pool = strong or alike or weak or list(candidates)
        least = min(map(_oddness, pool))
        pool = self._padded([each for each in pool if _oddness(each) == least], tensors)
        if denied:                                               # what is said wrong of parameters may be right of the storage
            pool = [each for each in pool if any(reading.storage for reading in self._readings(each, settings))] or pool
        ways = list(dict.fromkeys(f"{each.format.name}.{each.fit.storage}" for each in pool))
        if len(ways) > 1:
            against = f"; {self._disagreement(pool[0], settings)}" if denied else self._remedy(settings)
            return Layer(name, others=tensors, by=scheme.by,
                         why=f"the tensors fit {' and '.join(ways)}, and nothing says which{against}")
        best = _with_defaults(pool)
        if best is None:
            return Layer(name, others=tensors, by=scheme.by,
                         why=f"the tensors fit {' and '.join(each.label for each in pool)}, and nothing says which")
        if denied:
            problems.append(self._disagreement(best, settings))
        uses = {own: tensors[use.name] for own, use in best.fit.tensors.items() if use.name in tensors}
        problems += [] if denied or problems else self._contradicted(best, uses, settings)
        if scheme.settings is None and not _needs_no_settings(best.format):
            problems = [f"its config leaves it as it is, by {scheme.by}"]
        problems += [f"{full}: {OVERFLOWED_ZEROS}" for full in self._spilled(best, uses)]
        settle = tuple(tensors[leaf] for leaf in (*best.format.detect.get("tensors", {}), LAYER)
                       if leaf in tensors and tensors[leaf] not in uses.values())
        others = {leaf: full for leaf, full in tensors.items() if full not in (*uses.values(), *settle)}
        return Layer(name, best.format.name, best.fit.storage, best.fit.params, best.fit.shape, best.experts, uses,
                     self._numbers(best, tensors), settle, others, scheme.by, tuple(problems))

    def _agreeing(self, candidates: Sequence[_Candidate], settings: Mapping[str, Any],
                  ) -> tuple[list[_Candidate], list[_Candidate]]:
        """Those for which some rule gives every parameter that it speaks of their value; then those that weak rules choose."""
        key = id(candidates), id(settings)                       # most layers share both
        if key not in self.agreeing:
            self.agreeing[key] = candidates, settings, self._agreed(candidates, settings)
        return self.agreeing[key][2]

    def _agreed(self, candidates: Sequence[_Candidate], settings: Mapping[str, Any]) -> tuple[list[_Candidate], list[_Candidate]]:
        for equal in (_is, _means):
            found = [(each, reading.weak) for each in candidates for reading in self._readings(each, settings)
                     if all(equal(each, name, value) for name, value in reading.values.items())]
            if found:
                return [each for each, weak in found if not weak], [each for each, weak in found if weak]
        return [], []

    def _tells(self, candidate: _Candidate, tensors: Mapping[str, str]) -> bool:
        """Whether all words of a tensor are the one that the format's storage has there more often than not."""
        words = _words(candidate)
        return bool(words) and all(self._is_filled(tensors[candidate.fit.tensors[own].name], word) for own, word in words.items())

    def _padded(self, pool: Sequence[_Candidate], tensors: Mapping[str, str]) -> list[_Candidate]:
        """Of a format's storages that fit alike, those whose padding holds nothing, with padding if there are such."""
        if len({each.format.name for each in pool}) > 1 or len({each.fit.storage for each in pool}) < 2:
            return list(pool)
        told = [(each, self._padding(each, tensors)) for each in pool]
        return [each for each, free in told if free] or [each for each, free in told if free is None] or list(pool)

    def _padding(self, candidate: _Candidate, tensors: Mapping[str, str]) -> bool | None:
        """Whether padding holds nothing, in as many elements as to tell; None where there is too little, or none."""
        found = None
        for name, stored in candidate.format.layout(candidate.fit.storage, candidate.fit.params).items():
            if not stored.padding or name not in candidate.fit.tensors:
                continue
            full = tensors[candidate.fit.tensors[name].name]
            data, shape = self.folder.file(full).start(full, START_BYTES), self.folder.entry(full).shape
            size = self.folder.entry(full).nbytes // max(1, math.prod(shape))
            count = len(data) // max(1, size)
            held = int.from_bytes(data, "little") & int.from_bytes(stored.padding.to_bytes(size, "little") * count, "little")
            if held:
                return False
            found = True if count >= ENOUGH else found
        return found

    def _numbers(self, candidate: _Candidate, tensors: Mapping[str, str]) -> dict[str, float]:
        """The tensors of one number that are said in JSON alone."""
        wanted = [own for own, use in candidate.fit.tensors.items() if use.name not in tensors]
        said = from_tensors(candidate.format, self._contents(tensors)) if wanted else None
        return {} if said is None else {own: float(said[own]) for own in wanted}

    def _spilled(self, candidate: _Candidate, uses: Mapping[str, str]) -> list[str]:
        """Tensors whose producer lost fields, as far as the words at their beginning tell."""
        found = {own: rule[own] for rule in candidate.format.detect.get("spills", [])
                 if rule.get("storage") == candidate.fit.storage for own in rule if own in uses}
        return [uses[own] for own, bits in found.items()
                if has_overflowed_zeros(self.folder.file(uses[own]).start(uses[own], START_BYTES),
                                        int(candidate.fit.params[bits]))]

    def _is_filled(self, full: str, word: int) -> bool:
        data = self.folder.file(full).start(full, START_BYTES)
        return len(data) > 0 and data == word.to_bytes(4, "little") * (len(data) // 4)

    def _readings(self, candidate: _Candidate, settings: Mapping[str, Any]) -> list[Reading]:
        """What settings say of a candidate; those of qdsl that state no storage choose none against the words of tensors."""
        format, own = candidate.format, same(settings.get("quant_method"), OWN)
        rules = own_rule(format, settings) if own else format.detect.get("config")
        return [replace(reading, weak=reading.weak or (own and not reading.storage))
                for reading in readings(rules, list(format.params), settings) if reading.storage in ("", candidate.fit.storage)]

    def _is_spoken_of(self, candidate: _Candidate, settings: Mapping[str, Any]) -> bool:
        """Whether settings of this kind say anything of the format."""
        own = same(settings.get("quant_method"), OWN)
        if _needs_no_settings(candidate.format):
            return own and settings.get("format") in (None, candidate.format.name)
        return own or "config" in candidate.format.detect

    def _remedy(self, settings: Mapping[str, Any]) -> str:
        """What to add to qdsl's settings that leave the storage open, '' for others."""
        is_open = same(settings.get("quant_method"), OWN) and "storage" not in settings
        return f": state 'storage' in {self.says.source}" if self.says is not None and is_open else ""

    def _disagreement(self, candidate: _Candidate, settings: Mapping[str, Any]) -> str:
        """What settings say that the tensors do not bear out."""
        assert self.says is not None
        for reading in self._readings(candidate, settings):
            wrong = {reading.keys.get(name) for name, value in reading.values.items() if not _means(candidate, name, value)}
            said = ", ".join(f"{key} = {settings[key]}" for key in sorted(key for key in wrong if key))
            return f"{self.says.source} says {said or _brief(settings)}; the tensors fit {candidate.label}"
        return f"{self.says.source} says {_brief(settings)}; the tensors fit {candidate.label}"

    def _contradicted(self, best: _Candidate, uses: Mapping[str, str], settings: Mapping[str, Any]) -> list[str]:
        """Settings from which no parameter follows, and that the tensors speak against."""
        found: list[str] = []
        for reading in self._readings(best, settings):
            if self.says is None or not all(_means(best, name, value) for name, value in reading.values.items()):
                continue
            wrong = {key: f"the tensors fit {best.format.name} of {fact}" for key, fact in reading.facts.items()
                     if type(settings.get(key)) is int and settings[key] != fact}
            for key, wanted in reading.follows.items():
                [(source, (word, without))] = wanted.items()
                there, seen = self._seen(best, uses, source)
                if seen and key in settings and same(settings[key], without if there else word):
                    wrong[key] = seen
            if not wrong:
                return []
            found = found or [f"{self.says.source} says {key} = {settings[key]}, but {why}" for key, why in wrong.items()]
        return found

    def _seen(self, best: _Candidate, uses: Mapping[str, str], source: str) -> tuple[bool, str]:
        """Whether a tensor is there, an index not in order, a field not as usual, and in words; '' for what is not looked at."""
        layout = best.format.layout(best.fit.storage, best.fit.params)
        if source in layout:
            return source in uses, f"'{source}' is there" if source in uses else f"there is no '{source}'"
        for own in (name for name in uses if layout[name].optional == source and layout[name].dtype == "index"):
            entry, data = self.folder.entry(uses[own]), self.folder.file(uses[own]).start(uses[own], START_BYTES)
            if len(entry.shape) == 1 and not _rises(data):
                return True, f"'{own}' is not in order"
        for own, word in _words(best).items() if source not in best.format.indices else ():
            if self.folder.file(uses[own]).start(uses[own], 1) and not self._is_filled(uses[own], word):
                return True, f"'{own}' is not {word:#010x} throughout"
        return False, ""


def _needs_no_settings(format: Description) -> bool:
    """Whether qdsl alone writes the format: its tensors are recognised beside settings of other layers."""
    rule = format.detect.get("config")
    return isinstance(rule, Mapping) and same(rule.get("quant_method"), OWN)


def _words(candidate: _Candidate) -> dict[str, int]:
    """Tensors of a way to read a layer, and the word that each is more often than not full of."""
    for rule in candidate.format.detect.get("words", []):
        words = {own: int(str(word), 16) for own, word in rule.items() if own in candidate.fit.tensors}
        if rule.get("storage") == candidate.fit.storage and all(
                candidate.fit.params.get(name, value) == value for name, value in rule.items() if name not in words):
            return words
    return {}


def _ways(format: Description, given: Mapping[str, TensorInfo], contents: Mapping[str, Any], stated: Mapping[str, Any] | None,
          known: tuple[int, ...]) -> list[_Candidate]:
    """Every way to read tensors as a format's, with what is stated of them alone.  Raises LayoutMismatch.

    known: the shape that a caller gives, () for none.
    """
    shape, experts, params, numbers = _told(format, contents)
    if shape is None and len(known) in (2, 3):
        shape, experts = (known[-2], known[-1]), known[0] if len(known) == 3 else None
    given = {**dict.fromkeys(numbers, TensorInfo("float32", ())), **given}
    if any(isinstance(content, Mapping) for content in contents.values()):
        given = {leaf: _as_bytes(tensor) if leaf in format.in_bytes else tensor for leaf, tensor in given.items()}
    if shape is not None and experts is not None:
        return _flat(format, given, shape, experts, params)
    if stated is None:
        return _fitting(format, given, shape, None, params)
    found: list[_Candidate] = []
    nearest = LayoutMismatch(UNKNOWN, f"{format.name}: the header speaks of something else")
    for reading in readings(format.detect.get("header"), [*format.params, *EXTENTS], stated, stacks=True):
        extents = [reading.values.get(dim) for dim in EXTENTS]
        whole = [each for each in extents if type(each) is int and each >= 0]
        try:
            fit = _fitting(format, given, (whole[0], whole[1]) if len(whole) == 2 else shape, reading.storage or None, params)
        except LayoutMismatch as miss:
            nearest = max(nearest, miss, key=lambda each: each.reached)
            continue
        found += [each for each in fit if _is_stated(each, reading)]
        other = LayoutMismatch(TOLD, f"the header says {_told_of(stated)}; the tensors fit {fit[0].label}")
        nearest = max(nearest, other, key=lambda each: each.reached)
    if not found:
        raise nearest
    return found


def _is_stated(candidate: _Candidate, reading: Reading) -> bool:
    """Whether N, K, parameters and how many experts there are is what a header says; a block is of one of them, or of all."""
    for key, front in reading.fronts.items():
        if type(front) is not type(candidate.experts) or front not in ((candidate.experts, 1) if is_block(key) else
                                                                       (candidate.experts,)):
            return False
    (n, k), params = candidate.fit.shape, candidate.fit.params
    own: Mapping[str, object] = {**params, **candidate.format.numbers(params, (n, k)), "N": n, "K": k}
    return all(type(value) is type(own[name]) and value == own[name] for name, value in reading.values.items())


def _told_of(stated: Mapping[str, Any]) -> str:
    """What a header says of a weight, in a few words."""
    known = {key: value for key, value in flat(stated).items() if isinstance(value, int | str)
             or (isinstance(value, list) and all(isinstance(each, int) for each in value))}
    return ", ".join(f"{key} = {str(value)[:60]}" for key, value in list(known.items())[:8])


def _fitting(format: Description, given: Mapping[str, TensorInfo], shape: tuple[int, int] | None, storage: str | None,
             params: Mapping[str, int | str]) -> list[_Candidate]:
    """Every way to read tensors as a format's, as one weight or as those of experts.  Raises LayoutMismatch."""
    for experts in _experts(format, given):
        with suppress(LayoutMismatch):
            return [_Candidate(format, fit, experts) for fit in fits(format, {
                leaf: _of_one(tensor, experts) for leaf, tensor in given.items()}, shape, storage, params)]
    return [_Candidate(format, fit, None) for fit in fits(format, given, shape, storage, params)]


def _of_one(tensor: TensorInfo, experts: int) -> TensorInfo:
    """A tensor of one expert, all of which say the same of their shapes; one without their axis is of each."""
    if tensor.shape[:1] != (experts,):
        return tensor
    size = len(tensor.values) // experts
    same = tensor.values == tensor.values[:size] * experts
    return replace(tensor, shape=tensor.shape[1:], values=tensor.values[:size] if same else tensor.values)


def _told(format: Description, contents: Mapping[str, Any],
          ) -> tuple[tuple[int, int] | None, int | None, dict[str, int | str], list[str]]:
    """(N, K), E, parameters, and the tensors of one number that small tensors say; None, and missing, what they leave open.

    Raises LayoutMismatch.
    """
    said = from_tensors(format, contents)
    if said is None:
        raise LayoutMismatch(TOLD, f"{format.name}: {', '.join(contents)} says that it is of another format")
    numbers = [name for name in said if name in format.singles]
    for name, value in said.items():
        if name in numbers:
            wrong = not _is_float32(value)
        elif name == EXPERTS:
            wrong = type(value) is not int or value < 1
        elif name in EXTENTS:
            wrong = type(value) is not int or value < 0
        else:
            wrong = type(value) not in (int, str) or value not in format.params[name]
        if wrong:
            raise LayoutMismatch(TOLD + 1, f"{format.name}: {', '.join(contents)} says {name} = {value}")
    shape = (said["N"], said["K"]) if {*EXTENTS} <= said.keys() else None
    return shape, said.get(EXPERTS), {name: value for name, value in said.items() if name in format.params}, numbers


@lru_cache(maxsize=64)                                           # most layers have the same
def _rises(words: bytes) -> bool:
    """Whether numbers of 32 bits are in order."""
    numbers = struct.unpack(f"<{len(words) // 4}i", words)
    return list(numbers) == sorted(numbers)


def _is_float32(value: object) -> bool:
    """Whether it is a number that float32 holds, rounded."""
    try:
        return type(value) in (int, float) and len(struct.pack("<f", value)) == 4
    except (OverflowError, struct.error):
        return False


def _as_bytes(tensor: TensorInfo) -> TensorInfo:
    """Bytes that a file holds as numbers of a larger type; a weight of which all is said need not tell by its dtype."""
    size = WIDE.get(tensor.dtype)
    return tensor if size is None else TensorInfo("uint8", (size * math.prod(tensor.shape),))


def _without_numbers(content: Any) -> Any:
    """What JSON says, without the numbers that make no difference to what fits."""
    if not isinstance(content, Mapping):
        return content
    return {key: float if isinstance(value, float) else value for key, value in content.items()}


def _nearness(format: Description, given: Mapping[str, TensorInfo]) -> int:
    """How many tensors one of the format's storages knows by name and dtype."""
    return max(sum(given[key].dtype in [element_dtype(str(kind)) for kind in format.params.get(layout[name].dtype,
                                                                                            (layout[name].dtype,))]
                   for name, key in named(layout, given).items())
               for storages in format.variants.values() for layout in storages.values())


def _has_names(format: Description, given: Mapping[str, TensorInfo]) -> bool:
    """Whether the names of tensors, more than 'weight' alone, are those of a storage, or of tensors that any layer may have."""
    rules = format.detect.get("tensors", {})
    names = {leaf for leaf in given if leaf not in BESIDE and leaf not in rules}
    return not rules.keys().isdisjoint(given) or (len(names) > 1 and any(
        names <= {*named(layout, given).values()} for storages in format.variants.values() for layout in storages.values()))


def _flat(format: Description, given: Mapping[str, TensorInfo], shape: tuple[int, int], experts: int,
          params: Mapping[str, int | str]) -> list[_Candidate]:
    """Every way to read tensors that run through all experts.

    Raises LayoutMismatch, also where a block has weights of two experts.
    """
    one = {leaf: replace(tensor, shape=(tensor.shape[0] // experts, *tensor.shape[1:]))
           if tensor.shape and tensor.shape[0] % experts == 0 else tensor for leaf, tensor in given.items()}
    found = fits(format, one, shape, None, params)
    for fit in found:
        axes = [axis for stored in format.layout(fit.storage, fit.params).values() for axis in stored.axes]
        step = granule(axes, "N", format.numbers(fit.params, shape), shape[1])
        if shape[0] % step:
            raise LayoutMismatch(TOLD + 1, f"{format.name}.{fit.storage}: experts of {shape[0]} rows share blocks, "
                                 f"which begin every {step} rows")
    return [_Candidate(format, fit, experts) for fit in found]


def _experts(format: Description, given: Mapping[str, TensorInfo]) -> list[int]:
    """The first extent of all tensors of a storage, where they have an axis more than it; one number may be that of all."""
    found = []
    for storages in format.variants.values():
        for layout in storages.values():
            keys = named(layout, given)
            shapes = [(given[key].shape, len(layout[name].axes)) for name, key in keys.items()
                      if any(axis.dim != "1" for axis in layout[name].axes)]
            firsts = {shape[:1] if len(shape) > axes and all(each == 1 for each in shape[1 + axes:]) else ()
                      for shape, axes in shapes}
            if len(firsts) == 1 and any(len(shape) == 1 + axes for shape, axes in shapes) and all(
                    stored.optional or name in keys for name, stored in layout.items()):
                found += list(next(iter(firsts)))
    return list(dict.fromkeys(found))


def _differing(first: Quantization, other: Quantization) -> list[str]:
    """Settings of which two places say different things."""
    return [f"{other.source} says {key} = {value}, {first.source} {first.settings[key]}" for key, value in other.settings.items()
            if isinstance(value, int | str) and first.settings.get(key) is not None and not same(value, first.settings[key])]


def _oddness(candidate: _Candidate) -> tuple[bool, int]:
    """Of formats that fit alike: the one with the tensors' very shapes, then that without blocks; a single scale is for all."""
    return not candidate.fit.exact, len(candidate.format.sizes)


def _is(candidate: _Candidate, name: str, value: object) -> bool:
    """Whether a candidate's parameter is a value."""
    own = candidate.fit.params[name]
    return type(value) is type(own) and value == own


def _means(candidate: _Candidate, name: str, value: object) -> bool:
    """Whether it means the same: a block of a whole axis may be said in numbers, or as -1."""
    if name not in candidate.format.sizes or type(value) is not int:
        return _is(candidate, name, value)
    said, own = (candidate.format.numbers(each, candidate.fit.shape)[name] for each in ({name: value}, candidate.fit.params))
    return said == own


def _with_defaults(pool: Sequence[_Candidate]) -> _Candidate | None:
    """The only candidate, or the one in which parameters that are open have their defaults."""
    params = pool[0].format.params
    values = {name: list(dict.fromkeys(each.fit.params[name] for each in pool)) for name in params}
    wanted = {name: resolve_default(each, params[name][0]) for name, each in values.items()}
    return next((each for each in pool if each.fit.params == wanted), None)


def _brief(settings: Mapping[str, Any]) -> str:
    """The settings that say how weights are quantized, in a few words."""
    plain = {key: value for key, value in settings.items() if isinstance(value, int | str | bool) and value not in (None, "")}
    return ", ".join(f"{key} = {value}" for key, value in list(plain.items())[:6])


def _alike(name: str) -> str:
    """What modules of all blocks and experts have in common."""
    return re.sub(r"\d+", "*", name)
