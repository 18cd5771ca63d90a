"""Detects transforms of layers' inputs and outputs, by tensors next to weights and by settings.

A file of a producer says by which tensors and settings it states them.  A tensor states its transform in any checkpoint; settings
state transforms in those of their own producer.  qdsl's own settings list the transforms of each layer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qdsl.checkpoint.detect.ignored import Rules, rules
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.detect.quantization import EMBEDDINGS, Quantization
from qdsl.checkpoint.detect.rules import OWN, at, is_same
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import shown
from qdsl.core.producer import TransformRule, TransformSchemes
from qdsl.core.transforms import DTYPES, INPUT, OUTPUT, Transform, base_of, transform_of, why_unfit

OWN_TRANSFORMS = "transforms"                                            # qdsl's own setting: layers -> their transforms
HEAD = "lm_head"                                                 # has no tensor where it shares the embedding's weight
INTEGERS = ("I8", "U8", "I32")                                   # dtypes of matrices of ones, which have no scale


class TransformReader:
    """The transforms of a folder's layers.  quantization: its decisive settings, or None."""

    def __init__(self, folder: Folder, quantization: Quantization | None) -> None:
        self.folder = folder
        self.settings: Mapping[str, Any] = quantization.settings if quantization else {}
        self.source = quantization.source if quantization else ""
        own = producers().of(quantization.method) if quantization else None
        self.listed = self.settings.get(OWN_TRANSFORMS) if own is not None and own.name == OWN else None
        by_settings = [rule for rule in own.transforms if rule.when or rule.listed] if own is not None else []
        self.rules = [*(rule for producer in producers().every for rule in producer.transforms
                        if not (rule.when or rule.listed)), *by_settings]
        self.names = dict.fromkeys(folder.names())
        self.schemes = None
        if own is not None and own.schemes is not None and self.settings.get(own.schemes.key):
            self.schemes = Schemes(own.schemes, self.settings[own.schemes.key], quantization, self.names)  # type: ignore[arg-type]

    def outside(self, modules: Mapping[str, Mapping[str, str]]) -> set[str]:
        """Tensors of transforms that lie in modules of their own, such as 'mlp.act.scales' of 'mlp.down_proj'."""
        outside = self.of_rules(modules) | (self.schemes.tensors if self.schemes else set())
        if isinstance(self.listed, Mapping):
            every = [transform for name in self.listed for transform in self._own(name)[0]]
            outside |= {full for transform in every for full in transform.tensors if full in self.names}
        return outside

    def of_rules(self, modules: Mapping[str, Mapping[str, str]]) -> set[str]:
        """Those that rules name, whether settings state the transforms or not."""
        outside: set[str] = set()
        for rule in self.rules if self.listed is None else ():
            end = f".{rule.tensor}"
            if rule.listed:
                outside |= {full for full in self.names if full.rpartition(".")[2].startswith(rule.tensor)}
                continue
            for full in (name for name in self.names if "." in rule.tensor and name.endswith(end)):
                owner = full.removesuffix(end)
                layers = [f"{owner}.{last}" for last in rule.siblings] if rule.siblings else [owner]
                outside |= {full for layer in layers if layer in modules}
        return outside

    def of(self, name: str, shape: Sequence[int], tensors: Mapping[str, str], is_quantized: bool,
           ) -> tuple[tuple[Transform, ...], list[str]]:
        """The transforms of a layer, and why they cannot be computed.  shape: (N, K).  tensors: by the last parts of names."""
        if self.listed is not None:
            transforms, problems = self._own(name)
        else:
            transforms, problems = [], []
            for rule in self.rules if is_quantized else [rule for rule in self.rules if rule.tensor and not rule.when]:
                try:
                    is_shared = rule.listed and not any(own.kind == rule.kind for own in transforms)
                    transforms += self._shared(rule, name, shape) if is_shared else self._by_rule(rule, name, shape, tensors)
                except ValueError as error:
                    problems.append(str(error))
            if self.schemes is not None:
                more, wrong = self.schemes.of(name, shape, self.folder)
                transforms, problems = transforms + more, problems + wrong
        shapes = {full: self.folder.entry(full).shape for own in transforms for full in own.tensors if full in self.names}
        for own in transforms:
            if why := why_unfit(own, shape[1] if own.side == INPUT else shape[0], shapes):
                problems.append(f"its {own.side} is transformed ({own.label}): {why}")
        return tuple(transforms), problems

    def problems(self, modules: Mapping[str, Any]) -> list[str]:
        """Problems of the whole checkpoint."""
        wrong = self.schemes.problems(modules, self.folder) if self.schemes is not None else []
        if self.listed is not None and not isinstance(self.listed, Mapping):
            wrong.append(f"{OWN_TRANSFORMS} is {shown(str(self.listed))}, no object")
        return [f"{self.source}: {problem}" for problem in wrong]

    def _own(self, name: str) -> tuple[list[Transform], list[str]]:
        """The transforms that qdsl's settings list for a layer."""
        listed = self.listed.get(name) or [] if isinstance(self.listed, Mapping) else []
        try:
            return [transform_of(data) for data in (listed if isinstance(listed, list) else [listed])], []
        except ValueError as error:
            return [], [f"{self.source}: {OWN_TRANSFORMS}: {error}"]

    def _shared(self, rule: TransformRule, name: str, shape: Sequence[int]) -> Iterator[Transform]:
        """The transform of a layer that settings list, with a tensor of its size that such layers share."""
        if name in [own for listed in _every(self.settings, rule.listed) for own in _listed(listed)]:
            size = next((own for own in _every(self.settings, rule.size) if type(own) is int), shape[1])
            full = next((full for full in self.names if full.rpartition(".")[2] == f"{rule.tensor}{size}"), "")
            is_integer = bool(full) and self.folder.entry(full).dtype in INTEGERS
            yield Transform(rule.kind, tensor=full or f"{rule.tensor}{size}", size=size, normalized=is_integer, dtype=rule.dtype)

    def _by_rule(self, rule: TransformRule, name: str, shape: Sequence[int], tensors: Mapping[str, str]) -> Iterator[Transform]:
        """The transform that a rule states for a layer, if any.  Raises ValueError for one of unknown size."""
        is_stated = all(any(is_same(at(self.settings, key), value) for value in values) for key, values in rule.when.items())
        if rule.listed or not is_stated:
            return
        full, size_of = self._tensor(rule.tensor, rule, name, tensors), self._tensor(rule.size, rule, name, tensors)
        if not rule.when and not full and not (rule.optional and size_of):
            return
        size, normalized = 0, rule.normalized
        if rule.kind == "rotate" and full:
            entry = self.folder.entry(full)
            size, normalized = entry.shape[0] if entry.shape else 1, normalized or entry.dtype in INTEGERS
        elif rule.kind == "rotate":
            size = self._number(size_of) if size_of else at(self.settings, rule.size)
            if type(size) is not int or size < 1:
                raise ValueError(f"{self.source}: {rule.size} is {shown(str(size))}, which says no size of the blocks to rotate")
        base = base_of(size) if rule.based and not full else 1
        eps = at(self.settings, rule.eps) if rule.eps else 0.0
        if type(eps) not in (int, float, type(None)):
            raise ValueError(f"{self.source}: {rule.eps} is {shown(str(eps))}, no number")
        repeats = tuple(other for leaf in rule.repeats if (other := self._tensor(leaf, rule, name, tensors)))
        yield Transform(rule.kind, tensor=full, size=size, normalized=normalized, base=base, dtype=rule.dtype,
                        transposed=rule.transposed or (base > 1 and size == shape[1]),
                        eps=float(1e-6 if eps is None else eps), repeats=repeats)

    def _tensor(self, leaf: str, rule: TransformRule, name: str, tensors: Mapping[str, str]) -> str:
        """The full name of a rule's tensor for a layer, '' where there is none."""
        parent, _, last = name.rpartition(".")
        if rule.siblings and last not in rule.siblings:
            return ""
        full = tensors.get(leaf) or f"{parent if rule.siblings else name}.{leaf}".lstrip(".")
        return full if leaf and full in self.names else ""

    def _number(self, full: str) -> int:
        """The integer in a tensor of one number; 0 for any other tensor."""
        data = self.folder.file(full).start(full, 8)
        entry = self.folder.entry(full)
        code = {"I32": "<i", "I64": "<q"}.get(entry.dtype, "")
        return int(struct.unpack(code, data)[0]) if code and len(data) == struct.calcsize(code) else 0


class Schemes:
    """Transforms that settings state by schemes, each with lists of the modules that it transforms."""

    def __init__(self, keys: TransformSchemes, data: Any, quantization: Quantization, names: Mapping[str, Any]) -> None:
        self.keys, self.names, self.budget = keys, names, quantization.budget
        groups = data.get(keys.groups) if isinstance(data, Mapping) else None
        self.groups: dict[str, Any] = dict(groups) if isinstance(groups, Mapping) else {}
        self.wrong = [] if isinstance(groups, Mapping) or not data else [f"{keys.key} is {shown(str(data))}, which has no groups"]
        self.applied: list[tuple[str, Mapping[str, Any], Mapping[str, Any], Rules, Rules]] = []
        for name, scheme in self.groups.items():
            self._read(name, scheme)
        ends = tuple(f".{name}_{place}.{own}" for name in self.groups for place in (*keys.sides, *keys.fused, *keys.pairs)
                     for own in ("weight", "perm"))
        self.tensors = {full for full in names if full.endswith(ends)} if ends else set()

    def _read(self, name: str, scheme: Any) -> None:
        """The scheme's lists; problems with what is not known."""
        entries = scheme.get("apply") if isinstance(scheme, Mapping) else None
        if not isinstance(entries, list) or not all(isinstance(one, Mapping) for one in entries):
            self.wrong.append(f"{self.keys.key}: group {shown(name)} has no list 'apply'")
            return
        applied = [{**one, "location": str(one.get("location"))} for one in entries]
        if (kind := str(scheme.get("type"))) not in self.keys.types:
            self.wrong.append(f"{self.keys.key}: group {shown(name)} has the type {shown(kind)}; known are "
                              f"{', '.join(self.keys.types)}")
            return
        places = {*self.keys.sides, *self.keys.fused, *self.keys.pairs}
        for one in applied:
            if one["location"] not in places:
                self.wrong.append(f"{self.keys.key}: group {shown(name)} transforms {shown(one['location'])}; known are "
                                  f"{', '.join(sorted(places))}")
            if one.get("location") in self.keys.sides:
                targets, ignored = (rules(self.keys.targets, _listed(one.get(key)), self.budget) for key in ("targets", "ignore"))
                self.wrong += [*targets.problems, *ignored.problems]
                self.applied.append((name, scheme, one, targets, ignored))
        paired = [one for one in applied if one.get("location") in self.keys.pairs]
        is_cancelled = {one["location"] for one in paired} == {*self.keys.pairs} and self.keys.types[scheme["type"]] != "matrix" \
            and not any(one.get("inverse") for one in paired) and len({str(_listed(one.get("targets"))) for one in paired}) == 1
        if paired and not is_cancelled:
            both = " and ".join(one["location"] for one in paired)
            self.wrong.append(f"{self.keys.key}: group {shown(name)} transforms {both} so that scores of attention change, "
                              "which qdsl does not compute")

    def of(self, name: str, shape: Sequence[int], folder: Folder) -> tuple[list[Transform], list[str]]:
        """The transforms of a layer: those of x in the order in which they are computed, then those of the result."""
        before: list[Transform] = []
        after: list[Transform] = []
        problems: list[str] = []
        for group, scheme, one, targets, ignored in self.applied:
            if not self._names(targets, name, one.get("targets")) or self._names(ignored, name, one.get("ignore")):
                continue
            side = self.keys.sides[one["location"]]
            extent = shape[1] if side == INPUT else shape[0]
            dtype = str(scheme.get("precision") or "float32").removeprefix("torch.")
            if dtype not in DTYPES or EMBEDDINGS.fullmatch(name.rpartition(".")[2]):
                problems.append(f"{self.keys.key}: group {shown(group)}: " + (
                    f"precision {shown(dtype)} is none of {', '.join(DTYPES)}" if dtype not in DTYPES else
                    "transforms of an embedding's rows are not computed"))
                continue
            size = scheme.get("head_dim") or extent
            if type(size) is not int:
                problems.append(f"{self.keys.key}: group {shown(group)}: head_dim is {shown(str(size))}, no integer")
                continue
            own = self._transform(group, scheme, one, name, size, folder)
            (before if side == INPUT else after).append(Transform("rotate", side, dtype=dtype, **own))
        return [*before[::-1], *after], problems                 # a later one is computed first, as hooks are registered

    def _transform(self, group: str, scheme: Mapping[str, Any], one: Mapping[str, Any], name: str, size: int, folder: Folder,
                   ) -> dict[str, Any]:
        """Tensor, size and orientation of a layer's transform.  Modules share tensors, and files have a shared one once."""
        kind, inverse = self.keys.types[scheme["type"]], bool(one.get("inverse"))
        places = [one["location"]] if kind == "matrix" else [*self.keys.sides, *self.keys.pairs]
        tensors = {}
        for own, wanted in (("weight", (size, size)), ("perm", (size,))):
            full = f"{name}.{group}_{one['location']}.{own}"
            ends = tuple(f".{group}_{place}.{own}" for place in places)
            alike = [other for other in self.tensors if other.endswith(ends) and tuple(folder.entry(other).shape) == wanted]
            tensors[own] = full if full in self.names else min(alike, default="")
        tensor = tensors["weight"] or ("" if kind == "built" and not scheme.get("randomize") else f"{name}.{group}_weight")
        perm = (tensors["perm"] or f"{name}.{group}_perm") if kind == "built" and scheme.get("randomize") else ""
        return {"tensor": tensor, "perm": perm, "size": size, "normalized": kind != "matrix",
                "transposed": inverse and kind != "matrix"}

    def _names(self, listed: Rules, name: str, entries: Any) -> bool:
        """Whether a list names a layer, or all layers by their class."""
        with self.budget:
            return listed.first(name) is not None or (
                self.keys.every in _listed(entries) and not EMBEDDINGS.fullmatch(name.rpartition(".")[2]))

    def problems(self, modules: Mapping[str, Any], folder: Folder) -> list[str]:
        """What is wrong with the settings, and a transform of a head that has no weight of its own."""
        is_tied = HEAD not in modules and folder.config.get("tie_word_embeddings") is True
        of_head = [group for group, _, one, targets, ignored in self.applied if is_tied and self._names(
            targets, HEAD, one.get("targets")) and not self._names(ignored, HEAD, one.get("ignore"))]
        return [*self.wrong, *(f"{self.keys.key}: group {shown(group)} transforms {HEAD}, which shares the embedding's weight"
                               for group in of_head)]


def why_not_contained(layer: Layer) -> str:
    """Why a dense weight cannot contain a layer's transforms, without its bias; '' where it can."""
    for own in layer.transforms:
        if own.kind == "rms_norm":
            return f"its {own.side} is transformed ({own.label}), by a factor that depends on it"
        if own.side == OUTPUT and "bias" in layer.others:
            return f"its output is transformed ({own.label}), and its bias with it"
    return ""


def _every(settings: Any, key: str) -> list[Any]:
    """The settings of a name with dots, of all entries of lists on the way."""
    values = [settings]
    for part in key.split("."):
        values = [own for value in values for own in _listed(value) if isinstance(own, Mapping)]
        values = [own[part] for own in values if own.get(part) is not None]
    return values


def _listed(value: Any) -> list[Any]:
    """A list, or a single value as a list; [] for None."""
    return value if isinstance(value, list) else [] if value is None else [value]
