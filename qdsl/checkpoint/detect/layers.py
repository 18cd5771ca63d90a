"""Detects the quantized layers of a checkpoint and their formats, by tensors first, and by the config if tensors are ambiguous.

A module is quantized if it has the tensors of some storage.  Dtypes and shapes determine format, storage and parameters as in
`wrap`.  Settings choose among the candidates; a setting that contradicts the tensors is reported.  Does not import torch.

collect.py reads modules, fit.py lists candidates, judge.py chooses one, and report.py reports problems of the whole checkpoint.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qdsl.checkpoint.detect.collect import Module, ModuleReader
from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.fit import CLAIMED, UNKNOWN, Candidate, Evidence, candidates, claims_text, nearest_miss
from qdsl.checkpoint.detect.gguf_keys import config_findings
from qdsl.checkpoint.detect.groups import group_findings, groups
from qdsl.checkpoint.detect.judge import Judge
from qdsl.checkpoint.detect.layer import NOT_KNOWN, Layer, Layers
from qdsl.checkpoint.detect.ledger import content_findings, header_findings
from qdsl.checkpoint.detect.neighbors import kind_of, tensor_findings
from qdsl.checkpoint.detect.quantization import Quantization, Scheme, quantizations
from qdsl.checkpoint.detect.report import Report
from qdsl.checkpoint.detect.rules import OWN, Reading, unlisted_lengths
from qdsl.checkpoint.detect.tensor_names import WEIGHT
from qdsl.checkpoint.detect.transforms import TransformReader
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.core.stored import Description, LayoutMismatch
from qdsl.core.transforms import Transform

TRANSPOSED = "experts' weights are [E, K, N], as their extents tell"
BYTES = ("U8", "I8")                                             # dtypes of weights that may hold two codes per element
PLAIN = {"float16", "bfloat16", "float32", "float64", "int64", "bool"}       # dtypes of plain weights and buffers
FLOAT8 = {"float8_e4m3fn", "float8_e5m2"}                        # plain in cast models, without scales


def layers(folder: Folder, formats: Sequence[Description] | None = None, shapes: Mapping[str, Sequence[int]] | None = None,
           ) -> Layers:
    """The quantized layers of a folder, by the shipped formats or the given ones.

    shapes: (N, K), or (E, N, K) of experts, by module names; used if tensors do not state it, as padded ones do not.  Raises
    CheckpointError for an invalid settings file, and for settings that contradict tensors in what numbers depend on.  Other
    problems of a layer are recorded in it.
    """
    return detected_layers(folder, formats, shapes).refuse_contradictions(folder.path)


def detected_layers(folder: Folder, formats: Sequence[Description] | None = None,
                    shapes: Mapping[str, Sequence[int]] | None = None) -> Layers:
    """The same for reports: contradictions are recorded, too, and no weight may be read.

    Raises CheckpointError for an invalid settings file.
    """
    # Without formats of plain floats and of groups of weights, which groups.py reads.
    coded = [format for format in (descriptions() if formats is None else formats)
             if not {"safetensors", "parts"} & format.detect.keys()]
    return _Recognizer(folder, coded, quantizations(folder), shapes or {}).layers()


class _Recognizer:
    def __init__(self, folder: Folder, formats: Sequence[Description], quantized: list[Quantization],
                 shapes: Mapping[str, Sequence[int]]) -> None:
        self.folder = folder
        self.shapes = shapes
        self.formats = formats
        self.quantizations = quantized
        self.quantization = quantized[0] if quantized else None
        self.groups = groups(folder)
        self.collector = ModuleReader(folder, formats)
        self.judge = Judge(self.collector, self.quantization)
        self.further = [Judge(self.collector, other) for other in quantized[1:]]
        self.report = Report(folder, quantized, self.groups, formats)
        self.transforms = TransformReader(folder, self.quantization)
        self.findings = dict.fromkeys(finding for own in quantized for finding in own.findings)
        self.findings |= dict.fromkeys([*config_findings(folder.config), *group_findings(folder.config)])
        self.findings |= dict.fromkeys(finding for place, settings in self.collector.header_claims.wholes
                                       for finding in header_findings(place, settings))
        self._lengths: dict[int, tuple[Mapping[str, Any], Mapping[str, Sequence[Reading]]]] = {}
        self._fitting: dict[tuple[object, ...], list[Candidate] | LayoutMismatch] = {}

    @property
    def is_foreign(self) -> bool:
        """Whether settings of a producer other than qdsl state quantized layers."""
        return self.quantization is not None and self.quantization.method not in ("", OWN)

    def layers(self) -> Layers:
        in_groups = {full for group in self.groups for full in group.tensors.values()}
        modules = self.collector.names.modules(
            name for name in [*self.folder.names(), *self.folder.missing] if name not in in_groups)
        outside = self.transforms.outside(modules)
        modules = {name: own for name, tensors in modules.items()
                   if (own := {leaf: full for leaf, full in tensors.items() if full not in outside})}
        every = {name: self._layer(name, tensors) for name, tensors in modules.items()}
        every |= {name: self._layer(name, modules[name], transposed=True) for name in self._transposed(every)}
        used = {self.collector.kind(leaf, modules[name][leaf]) for name, layer in every.items() if layer is not None
                for leaf in modules[name] if modules[name][leaf] in layer.tensors.values()}
        every = {name: layer or self._misfit_layer(name, modules[name], used) for name, layer in every.items()}
        if self.is_foreign and not any(every.values()):
            every = {name: self._unnamed(name, tensors) for name, tensors in modules.items()}
        quantized = {name: self._with_transforms(layer, modules[name]) for name, layer in every.items() if layer is not None}
        of_layers = {full for layer in quantized.values()
                     for full in (*layer.tensors.values(), *layer.settings, *layer.others.values())} | outside
        unquantized = {name: tensors for name, tensors in modules.items() if name not in quantized}
        transforms, wrong = self._plain_transforms(unquantized)
        of_x = {full for own in (*transforms.values(), *(layer.transforms for layer in quantized.values())) for transform in own
                for full in (*transform.tensors, *transform.repeats)}
        of_layers = (of_layers | of_x) - (self.transforms.of_rules(modules) - of_x)      # no settings speak of the others
        plain = [name for name in self.folder.names() if name not in of_layers]
        wrong += self.transforms.problems(modules)
        is_computed = bool(transforms) or any(layer.transforms for layer in quantized.values())
        findings = [*(finding for finding in self.findings if not (finding.is_transform and is_computed)),
                    *tensor_findings(self.folder, quantized.values(), plain)]
        return Layers(list(quantized.values()), plain, self.report.left(unquantized, quantized), self.quantizations,
                      self.report.problems(quantized, modules), self.groups, self.report.notes(modules),
                      [*self.report.contradictions(quantized), *wrong], transforms, findings)

    def _with_transforms(self, layer: Layer, tensors: Mapping[str, str]) -> Layer:
        """A layer with the transforms of its input and output; what cannot be computed contradicts it."""
        if layer.why:
            return layer
        transforms, problems = self.transforms.of(layer.name, layer.shape, tensors, True)
        return replace(layer, transforms=transforms, contradictions=(*layer.contradictions, *problems)) \
            if transforms or problems else layer

    def _plain_transforms(self, modules: Mapping[str, Mapping[str, str]]) -> tuple[dict[str, tuple[Transform, ...]], list[str]]:
        """The transforms of modules with a plain matrix, by name, and what cannot be computed."""
        every: dict[str, tuple[Transform, ...]] = {}
        wrong: list[str] = []
        for name, tensors in modules.items():
            full = tensors.get(WEIGHT, "")
            entry = self.folder.entry(full) if full and full not in self.folder.missing else None
            if entry is None or len(entry.shape) != 2:
                continue
            transforms, problems = self.transforms.of(name, entry.shape, tensors, False)
            every |= {name: transforms} if transforms else {}
            wrong += [f"{name}: {problem}" for problem in problems]
        return every, wrong

    def _layer(self, name: str, tensors: Mapping[str, str], transposed: bool = False) -> Layer | None:
        """The module as a layer; None if it has only plain tensors.  transposed: its tensors are [E, K, N]."""
        layer = self._layer_of(name, tensors, transposed, ())
        if layer is not None and name in self.shapes and (layer.why or layer.shape != tuple(self.shapes[name])[-2:]):
            shaped = self._layer_of(name, tensors, transposed, tuple(self.shapes[name]))
            layer = shaped if shaped is not None and (layer.why or not shaped.why) else layer
        return layer

    def _layer_of(self, name: str, tensors: Mapping[str, str], transposed: bool, shape: tuple[int, ...]) -> Layer | None:
        """As _layer, with the caller's shape, or ()."""
        try:
            module = self.collector.module(name, tensors, shape, transposed)
            self.findings |= dict.fromkeys(header_findings("header", module.claims or {}))
            scheme = self.judge.scheme(name)
            fitting = self._candidates(module, scheme)
        except CheckpointError as error:                         # invalid JSON
            return Layer(name, others=self.collector.present(tensors), why=str(error))
        if fitting is None:
            return None
        if not isinstance(fitting, LayoutMismatch):
            return replace(self._judged(module, fitting, scheme), transposed=transposed)
        why = self._unknown(module) if fitting.reached == UNKNOWN else f"{TRANSPOSED}: {fitting}" if transposed else str(fitting)
        missing = self.collector.missing(tensors)
        contradictions = (why,) if fitting.reached >= CLAIMED and not missing else ()        # of a header, or of small tensors
        return Layer(name, others=module.tensors, by=scheme.by, why=missing or why, contradictions=contradictions)

    def _judged(self, module: Module, fitting: Sequence[Candidate], scheme: Scheme) -> Layer:
        """The layer by the decisive settings; settings of other places that mean other numbers contradict it."""
        layer = self.judge.layer(module, fitting, scheme)
        denials = [text for judge in self.further if layer.format for text in judge.denials(module, fitting, layer)]
        return replace(layer, contradictions=(*layer.contradictions, *denials)) if denials else layer

    def _candidates(self, module: Module, scheme: Scheme) -> list[Candidate] | LayoutMismatch | None:
        """The candidates for a module's tensors, or why there are none; None if they are plain.

        8-bit floats without any scale but those of x are casts, unless settings or a marker state scales, or files are
        missing.  Raises CheckpointError.
        """
        entries = self.collector.entries(module.tensors)
        names = self.collector.names.names
        coded = [entry for leaf, entry in entries.items() if entry.dtype not in PLAIN and leaf in names]
        is_cast = (self.quantization is None or self.quantization.method == OWN) and module.is_complete and bool(coded) \
            and coded[0].dtype in FLOAT8 and len({*entries} & {*names, *self.collector.layer_tensors}) == 1 \
            and not any("scale" in leaf and leaf not in names and kind_of(full, None) is None
                        for leaf, full in module.tensors.items())
        if module.claims is None and not coded:
            return None
        if module.claims is None and is_cast and len(coded[0].shape) not in (2, 3):
            return None
        contents = self.collector.contents(module.tensors)
        self.findings |= dict.fromkeys(finding for leaf, content in contents.items() if isinstance(content, Mapping)
                                       for finding in content_findings(leaf, content, self.collector.json_keys[leaf]))
        whole = self.quantization.settings if self.quantization else {}
        lengths = self._unlisted_lengths(whole if scheme.settings is None else scheme.settings)
        evidence = Evidence(self.collector.read_entries(module, contents), contents, module.claims, module.shape, lengths)
        key = evidence.key
        if key not in self._fitting:
            self._fitting[key] = self._fit(evidence, is_cast, bool(coded) and coded[0].dtype in FLOAT8)
        return self._fitting[key]

    def _unlisted_lengths(self, settings: Mapping[str, Any]) -> Mapping[str, Sequence[Reading]]:
        """The readings of a layer's settings that state block lengths that specs do not list, by format."""
        if id(settings) not in self._lengths:                    # settings stay alive here, so that ids stay unique
            lengths = {format.name: unlisted_lengths(format, settings) for format in self.formats}
            self._lengths[id(settings)] = settings, {name: read for name, read in lengths.items() if read}
        return self._lengths[id(settings)][1]

    def _fit(self, evidence: Evidence, is_cast: bool, is_float8: bool) -> list[Candidate] | LayoutMismatch:
        """The candidates with all the scales that they need, or why there are none."""
        every = candidates(self.formats, evidence)
        scaled = [candidate for candidate in every if (is_cast and not self.collector.has_scale_marker) or candidate.has_scale]
        if scaled:
            return scaled
        nearest = self._nearest(evidence)
        if every and (evidence.claims is not None or (nearest.reached == UNKNOWN and is_float8)):
            return LayoutMismatch(0, f"{every[0].label} needs a scale; given are {', '.join(evidence.entries)}")
        return nearest

    def _nearest(self, evidence: Evidence) -> LayoutMismatch:
        """The reason why tensors fit no format, from the nearest miss."""
        configs = [] if self.quantization is None else \
            [self.quantization.settings, *(group.settings for group in self.quantization.groups if group.settings is not None)]
        return nearest_miss(self.formats, evidence, configs, self.is_foreign, NOT_KNOWN)

    def _unknown(self, module: Module) -> str:
        """Why a layer has no format: by its header's claims, or else by its tensors."""
        entries = {leaf: self.folder.entry(full) for leaf, full in module.tensors.items()}
        shapes = ", ".join(f"{leaf} {entry.dtype} {list(entry.shape)}" for leaf, entry in entries.items())
        return f"{NOT_KNOWN}: {claims_text(module.claims) if module.claims else shapes}"

    def _misfit_layer(self, name: str, tensors: Mapping[str, str], used: Container[tuple[str, str, int]]) -> Layer | None:
        """A module with tensors of quantized layers that fits no format, such as a scale without codes."""
        present = self.collector.present(tensors)
        if not any(self.collector.kind(leaf, full) in used for leaf, full in present.items()):
            return None
        nearest = self._nearest(Evidence(self.collector.entries(present), {}, None))
        return Layer(name, others=present, why=self.collector.missing(tensors) or str(nearest))

    def _unnamed(self, name: str, tensors: Mapping[str, str]) -> Layer | None:
        """A module with coded matrices of unknown names, if settings state that layers are quantized."""
        present = self.collector.present(tensors)
        is_coded = any(entry.dtype not in PLAIN and len(entry.shape) > 1 for entry in self.collector.entries(present).values())
        return Layer(name, others=present, why=self._unknown(Module(name, present, None))) if is_coded else None

    def _transposed(self, layers: Mapping[str, Layer | None]) -> set[str]:
        """Experts whose weights are [E, K, N], although their tensors may fit as [E, N, K].

        One of a module's two weights produces the input of the other; for gate and up it has twice the rows that the other has
        columns.
        """
        siblings: dict[str, dict[str, tuple[int, int]]] = {}
        for name, layer in layers.items():
            if layer is not None and (extents := self._extents(layer)) is not None:
                siblings.setdefault(name.rpartition(".")[0], {})[name] = extents
        return {name for weights in siblings.values() for one, (n, k) in weights.items() for other, (m, j) in weights.items()
                if n == j and k == 2 * m for name in (one, other)}

    def _extents(self, layer: Layer) -> tuple[int, int] | None:
        """N and K of experts; for unknown formats the extents of their tensor, with two codes of K per byte."""
        if layer.format:
            return None if layer.experts is None else layer.shape
        full = layer.others.get("weight", "")
        entry = self.folder.entry(full) if full else None
        if entry is None or len(entry.shape) != 3:
            return None
        return entry.shape[1] * (2 if entry.dtype in BYTES else 1), entry.shape[2]
