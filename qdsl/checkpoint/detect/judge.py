"""Chooses one candidate per layer by settings; settings that contradict the tensors become contradictions of the layer."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from qdsl.checkpoint.detect.collect import Module, ModuleReader
from qdsl.checkpoint.detect.fit import Candidate, Evidence, candidates_of, nearest_miss
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.detect.quantization import Quantization, Scheme
from qdsl.checkpoint.detect.rules import OWN, Reading, at, from_tensors, is_same, own_rule, readings, unmet
from qdsl.checkpoint.detect.tensor_names import WEIGHT
from qdsl.checkpoint.files.safetensors import torch_name
from qdsl.core.overflowed_zeros import OVERFLOWED_ZEROS, has_overflowed_zeros
from qdsl.core.producer import ABOUT_RULE
from qdsl.core.stored import Description, LayoutMismatch, resolve_default
from qdsl.core.text import join_names

UNFILLED = 0xFFFFFFFF                                             # an index of -1, as compressed-tensors initialises it
ENOUGH = 64                                                      # elements whose zeros cannot be chance


@dataclass(frozen=True, slots=True)
class Agreement:
    """Candidates that settings select: strong ones by stated settings, weak ones also by absent settings."""

    strong: list[Candidate]
    weak: list[Candidate]


class Judge:
    """Chooses one candidate per layer.  quantization: the settings of the checkpoint, or None."""

    def __init__(self, collector: ModuleReader, quantization: Quantization | None) -> None:
        self.collector = collector
        self.quantization = quantization
        self.source = quantization.source if quantization else ""
        # Most layers share candidates and settings; both are kept alive here so that their ids stay unique.
        self._agreements: dict[tuple[int, int], tuple[Sequence[Candidate], Mapping[str, Any], Agreement]] = {}

    def scheme(self, name: str) -> Scheme:
        """The settings of a module; empty ones without settings of the checkpoint."""
        return self.quantization.scheme(name) if self.quantization else Scheme({})

    def denials(self, module: Module, candidates: Sequence[Candidate], layer: Layer) -> tuple[str, ...]:
        """How these settings, of a place that is not decisive, contradict what a layer was recognised as.

        Settings of no known producer are not read by anybody.  Those of a part of the model deny what they read otherwise alone.
        """
        if self.quantization is None or not producers().is_known(self.quantization.method):
            return ()
        scheme = self.scheme(module.name)
        strong = self._agreement(candidates, scheme.settings).strong if scheme.settings else []
        other = self.layer(module, candidates, scheme)
        own, ways = (layer.format, layer.storage, layer.params), [(other.format, other.storage, other.params)]
        if self.quantization.is_of_part:
            ways = [(candidate.format.name, candidate.fit.storage, candidate.fit.params) for candidate in strong]
        elif other.contradictions or not other.format or not scheme.settings:
            return other.contradictions
        if own in ways or not strong or scheme.settings is None:
            return ()
        return (f"{self.source} says {self._says(scheme.settings)}, which is {ways[0][0]}.{ways[0][1]}; other settings say "
                f"{own[0]}.{own[1]}",)

    def layer(self, module: Module, candidates: Sequence[Candidate], scheme: Scheme) -> Layer:
        """The layer as the only candidate that its settings leave, or with the reason why several are left."""
        settings = scheme.settings if scheme.settings is not None else self.quantization.settings if self.quantization else {}
        agreement = self._agreement(candidates, settings)
        strong, weak = agreement.strong, agreement.weak
        if module.claims is None:
            open_to_all = [candidate for candidate in candidates if not self._needs_a_word(candidate, settings)]
            if not open_to_all or (not settings and self._fits_claimed(module, open_to_all)):
                return Layer(module.name, others=module.tensors, by=scheme.by,
                             why=f"the tensors fit {candidates[0].label}, and nothing says that they are that")
            candidates, weak = open_to_all, [candidate for candidate in weak if candidate in open_to_all]
            strong = [candidate for candidate in strong if candidate in open_to_all]
        telling = [candidate for candidate in candidates if self._has_its_words(candidate, module.tensors)]
        is_denied = bool(settings) and not strong and not weak and any(
            self._is_spoken_of(candidate, settings) for candidate in candidates)
        contradictions: list[str] = []
        if strong and telling and not any(candidate in strong for candidate in telling):
            contradictions.append(f"{self.source} says {self._says(settings)}, which is {strong[0].label}, but its tensors hold "
                                  f"what {telling[0].label} has")
        alike = [candidate for candidate in telling
                 if not weak or any(candidate.fit.params == other.fit.params for other in weak)]
        pool = self._simplest(strong or alike or weak or list(candidates), module, settings, is_denied)
        best = _with_defaults(pool)
        if reason := self._undecided(module, pool, best, settings, is_denied):
            return Layer(module.name, others=module.tensors, by=scheme.by, why=reason)
        assert best is not None
        if "bias" in module.tensors and (order := best.format.detect.get("bias")):
            return Layer(module.name, others=module.tensors, by=scheme.by,
                         why=f"it is {best.label}, whose bias is {order}; qdsl adds biases as they are")
        problems: list[str] = []
        if is_denied:
            is_padded = _is_padded(best, str(settings.get("storage", "")), candidates)
            (problems if is_padded else contradictions).append(self._disagreement(module, best, settings))
        return self._layer(module, best, scheme, settings, contradictions, problems)

    def _simplest(self, pool: list[Candidate], module: Module, settings: Mapping[str, Any], is_denied: bool) -> list[Candidate]:
        """The least odd candidates, whose padding is empty."""
        least = min(map(_oddness, pool))
        pool = self._padded([candidate for candidate in pool if _oddness(candidate) == least], module.tensors)
        if not is_denied:
            return pool
        # Settings that are wrong about parameters may be right about the storage.
        return [candidate for candidate in pool
                if any(reading.storage for reading in self._readings(candidate, settings))] or pool

    def _undecided(self, module: Module, pool: Sequence[Candidate], best: Candidate | None, settings: Mapping[str, Any],
                   is_denied: bool) -> str:
        """Why a layer is ambiguous; '' if it is not."""
        ways = list(dict.fromkeys(f"{candidate.format.name}.{candidate.fit.storage}" for candidate in pool))
        if len(ways) > 1:
            against = f"; {self._disagreement(module, pool[0], settings)}" if is_denied else self._remedy(settings)
            return f"the tensors fit {' and '.join(ways)}, and nothing says which{against}"
        if best is None:
            return f"the tensors fit {' and '.join(candidate.label for candidate in pool)}, and nothing says which"
        return ""

    def _layer(self, module: Module, best: Candidate, scheme: Scheme, settings: Mapping[str, Any],
               contradictions: list[str], problems: list[str]) -> Layer:
        tensors = module.tensors
        uses = {own: tensors[use.name] for own, use in best.fit.tensors.items() if use.name in tensors}
        denied, harmless = self._denied(best, uses, settings)
        contradictions, problems = contradictions or denied, problems or harmless
        if scheme.settings is None and not needs_no_settings(best.format):
            contradictions = []                                  # no settings speak of its numbers
            problems = [f"its config leaves it as it is, by {scheme.by}"]
        problems += [f"{full}: {OVERFLOWED_ZEROS}" for full in self._overflowed(best, uses)]
        every = producers().every if self.quantization is None else [producers().of(self.quantization.method)]
        rounding = [leaf for own in every for leaf in own.neighbors.rounding.get(best.format.name, ())]
        empty = [leaf for leaf, full in tensors.items() if self.collector.is_empty(leaf, full)]
        recognised = [*best.format.detect.get("tensors", {}), *self.collector.layer_tensors, *rounding, *empty]
        small = tuple(tensors[leaf] for leaf in recognised if leaf in tensors and tensors[leaf] not in uses.values())
        others = {leaf: full for leaf, full in tensors.items() if full not in (*uses.values(), *small)}
        if WEIGHT in others:
            contradictions = [*contradictions, f"it is {best.label}, and has a tensor {WEIGHT!r}, too"]
        return Layer(module.name, best.format.name, best.fit.storage, best.fit.params, best.fit.shape, best.experts, uses,
                     self._numbers(best, tensors), small, others, scheme.by, tuple(problems), tuple(contradictions))

    # -- settings ---------------------------------------------------------------------------------------------------------

    def _agreement(self, candidates: Sequence[Candidate], settings: Mapping[str, Any]) -> Agreement:
        key = id(candidates), id(settings)
        if key not in self._agreements:
            self._agreements[key] = candidates, settings, self._agreed(candidates, settings)
        return self._agreements[key][2]

    def _agreed(self, candidates: Sequence[Candidate], settings: Mapping[str, Any]) -> Agreement:
        """The candidates whose parameters all have the values of some rule."""
        for equal in (Candidate.is_value, Candidate.means):
            agreeing = [(candidate, reading.weak) for candidate in candidates for reading in self._readings(candidate, settings)
                        if all(equal(candidate, name, value) for name, value in reading.values.items())]
            if agreeing:
                return Agreement([candidate for candidate, weak in agreeing if not weak],
                                 [candidate for candidate, weak in agreeing if weak])
        return Agreement([], [])

    def _readings(self, candidate: Candidate, settings: Mapping[str, Any]) -> list[Reading]:
        """The rules' readings of settings for a candidate; qdsl's settings without a storage do not overrule tensors."""
        format, own = candidate.format, is_same(settings.get("quant_method"), OWN)
        rules = own_rule(format, settings) if own else format.detect.get("config")
        return [replace(reading, weak=reading.weak or (own and not reading.storage))
                for reading in readings(rules, list(format.params), settings) if reading.storage in ("", candidate.fit.storage)]

    def _needs_a_word(self, candidate: Candidate, settings: Mapping[str, Any]) -> bool:
        """Whether a candidate is only for headers and settings to choose, and these settings do not name its storage."""
        storage = candidate.fit.storage
        return storage in candidate.format.claimed and all(own.storage != storage for own in self._readings(candidate, settings))

    def _fits_claimed(self, module: Module, candidates: Sequence[Candidate]) -> bool:
        """Whether a layer without JSON, in a file in which other layers have some, also fits a storage that only JSON names."""
        for candidate in candidates if self.collector.has_layer_tensors else ():
            for storage in candidate.format.claimed:
                with suppress(LayoutMismatch):
                    return bool(candidates_of(candidate.format, self._evidence(module), storage))
        return False

    def _evidence(self, module: Module) -> Evidence:
        contents = self.collector.contents(module.tensors)
        return Evidence(self.collector.read_entries(module, contents), contents, module.claims, module.shape)

    def _is_spoken_of(self, candidate: Candidate, settings: Mapping[str, Any]) -> bool:
        """Whether settings of this kind have a rule for the format."""
        own = is_same(settings.get("quant_method"), OWN)
        if needs_no_settings(candidate.format):
            return own and settings.get("format") in (None, candidate.format.name)
        return own or "config" in candidate.format.detect

    def _says(self, settings: Mapping[str, Any]) -> str:
        """The settings that a storage is chosen by, as text."""
        return _deciding_settings_text(self.collector.formats, settings) or brief(settings)

    def _remedy(self, settings: Mapping[str, Any]) -> str:
        """The setting to add if qdsl's settings leave the storage open; '' for other settings."""
        is_open = is_same(settings.get("quant_method"), OWN) and "storage" not in settings
        return f": state 'storage' in {self.source}" if self.quantization is not None and is_open else ""

    def _disagreement(self, module: Module, candidate: Candidate, settings: Mapping[str, Any]) -> str:
        """Problems of settings that contradict the tensors: which ones, or why the tensors are not what they say."""
        wrong_settings = ""
        for reading in self._readings(candidate, settings)[:1]:
            wrong = {reading.keys.get(name) for name, value in reading.values.items() if not candidate.means(name, value)}
            wrong_settings = ", ".join(f"{key} = {at(settings, key)}" for key in sorted(key for key in wrong if key))
        why = "" if wrong_settings else str(nearest_miss(self.collector.formats, self._evidence(module), [settings], True, ""))
        needs = "" if wrong_settings else _rule_needs_text(candidate, settings)
        parts = [f"{self.source} says {wrong_settings or self._says(settings)}", f"the tensors fit {candidate.label}{needs}", why,
                 *([] if self.quantization is None else self.quantization.problems[:1])]
        return "; ".join(filter(None, parts))

    def _denied(self, best: Candidate, uses: Mapping[str, str], settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Contradictions of settings that determine no parameter, and those that change no number.

        An index of columns that is stored, though settings say that there is none, changes no number: it says where columns
        belong, and the producers' own readers use it.
        """
        contradictions: list[str] = []
        harmless: list[str] = []
        for reading in self._readings(best, settings):
            if self.quantization is None or not all(best.means(name, value) for name, value in reading.values.items()):
                continue
            wrong = self._wrong_settings(reading, best, uses, settings)
            if not wrong:
                return [], []
            if not contradictions and not harmless:
                for key, why in wrong.items():
                    is_index = any(_is_index(best, own, reading.follows.get(key, ())) for own in uses)
                    text = f"{self.source} says {key} = {at(settings, key)}, but {why}"
                    (harmless if is_index else contradictions).append(text)
        return contradictions, harmless

    def _wrong_settings(self, reading: Reading, best: Candidate, uses: Mapping[str, str], settings: Mapping[str, Any],
                        ) -> dict[str, str]:
        """Settings of a rule that contradict the tensors, with the reason."""
        constants = {key: constant if isinstance(constant, list) else [constant] for key, constant in reading.constants.items()}
        wrong = {key: f"the tensors fit {best.format.name} of {_value(best, words[-1])}" for key, words in constants.items()
                 if (own := at(settings, key)) is not None and not any(
                     best.means(word, own) if _value(best, word) != word else is_same(own, word) for word in words)}
        wrong |= self._wrong_words(best, uses, settings)
        for key, wanted in reading.follows.items():
            [(source, (word, without))] = wanted.items()
            is_stored, observed = self._observed(best, uses, source)
            if observed and key in settings and is_same(settings[key], without if is_stored else word):
                wrong[key] = observed
        return wrong

    def _wrong_words(self, best: Candidate, uses: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, str]:
        """The setting with the type of words, where tensors have another."""
        shorter = producers().of(settings.get("quant_method")).shorter
        claim = None if shorter is None else settings.get(shorter.setting)
        if shorter is None or claim is None:
            return {}
        axes = shorter.axes.get(best.format.name, {}).get(best.fit.storage, {})
        dtypes = {own: torch_name(self.collector.folder.entry(uses[own]).dtype) for own in axes if own in uses}
        other = next((f"'{own}' is {dtype}" for own, dtype in dtypes.items() if not is_same(claim, dtype)), "")
        return {shorter.setting: other} if other else {}

    # -- tensors ----------------------------------------------------------------------------------------------------------

    def _observed(self, best: Candidate, uses: Mapping[str, str], source: str) -> tuple[bool, str]:
        """Whether a tensor is stored, an index is out of order, or a field differs from its default; and a description, or ''."""
        layout = best.format.layout(best.fit.storage, best.fit.params)
        if source in uses and self._changes_nothing(layout[source].dtype, uses[source]):
            return True, ""
        if source in layout:
            return source in uses, f"'{source}' is there" if source in uses else f"there is no '{source}'"
        for own in (name for name in uses if layout[name].optional == source and layout[name].dtype == "index"):
            if len(self.collector.folder.entry(uses[own]).shape) == 1 and not self.collector.rises(uses[own]):
                return True, f"'{own}' is not in order"
        for own, word in _usual_words(best).items() if source not in best.format.indices else ():
            if self.collector.start(uses[own]) and not self.collector.is_filled(uses[own], word):
                return True, f"'{own}' is not {word:#010x} throughout"
        missing = _lacks_index(best, uses, source)
        return False, f"there is no '{missing}'" if missing else ""

    def _changes_nothing(self, dtype: str, full: str) -> bool:
        """Whether a stored index has its columns in order or was never filled, or zero points are all 0."""
        data = self.collector.start(full)
        if dtype == "index":
            return self.collector.rises(full) or self.collector.is_filled(full, UNFILLED)
        return self.collector.folder.entry(full).dtype == "I8" and len(data) > 0 and not any(data)

    def _has_its_words(self, candidate: Candidate, tensors: Mapping[str, str]) -> bool:
        """Whether all words of a tensor equal the word that is typical for the format's storage."""
        words = _usual_words(candidate)
        return bool(words) and all(self.collector.is_filled(tensors[candidate.fit.tensors[own].name], word)
                                   for own, word in words.items())

    def _padded(self, pool: Sequence[Candidate], tensors: Mapping[str, str]) -> list[Candidate]:
        """Among equally fitting storages of a format, those with empty padding; those with padding first."""
        if len({candidate.format.name for candidate in pool}) > 1 or len({candidate.fit.storage for candidate in pool}) < 2:
            return list(pool)
        paddings = [(candidate, self._has_free_padding(candidate, tensors)) for candidate in pool]
        return [candidate for candidate, is_free in paddings if is_free] or \
            [candidate for candidate, is_free in paddings if is_free is None] or list(pool)

    def _has_free_padding(self, candidate: Candidate, tensors: Mapping[str, str]) -> bool | None:
        """Whether padding is empty, in enough elements to be sure; None if there is too little or no padding."""
        is_free = None
        for name, stored in candidate.format.layout(candidate.fit.storage, candidate.fit.params).items():
            if not stored.padding or name not in candidate.fit.tensors:
                continue
            full = tensors[candidate.fit.tensors[name].name]
            data, entry = self.collector.start(full), self.collector.folder.entry(full)
            size = entry.nbytes // max(1, math.prod(entry.shape))
            count = len(data) // max(1, size)
            mask = int.from_bytes(stored.padding.to_bytes(size, "little") * count, "little")
            if int.from_bytes(data, "little") & mask:
                return False
            is_free = True if count >= ENOUGH else is_free
        return is_free

    def _numbers(self, candidate: Candidate, tensors: Mapping[str, str]) -> dict[str, float]:
        """The one-number tensors that only JSON states."""
        wanted = [own for own, use in candidate.fit.tensors.items() if use.name not in tensors]
        values = from_tensors(candidate.format, self.collector.contents(tensors)) if wanted else None
        return {} if values is None else {own: float(values[own]) for own in wanted}

    def _overflowed(self, candidate: Candidate, uses: Mapping[str, str]) -> list[str]:
        """Notes on tensors whose producer lost fields, judged by their first words."""
        widths = {own: rule[own] for rule in candidate.format.detect.get("spills", [])
                  if rule.get("storage") == candidate.fit.storage for own in rule if own in uses}
        return [uses[own] for own, bits in widths.items()
                if has_overflowed_zeros(self.collector.start(uses[own]), int(candidate.fit.params[bits]))]


def _value(best: Candidate, word: Any) -> Any:
    """The value of a parameter by its name; other words of a rule as they are."""
    return best.fit.params.get(word, word) if isinstance(word, str) else word


def needs_no_settings(format: Description) -> bool:
    """Whether only qdsl writes the format, so that its tensors are recognised without settings."""
    rules = format.detect.get("config", [])
    return bool(rules) and all(is_same(rule["quant_method"], OWN) for rule in rules)


def _rule_needs_text(candidate: Candidate, settings: Mapping[str, Any]) -> str:
    """What the nearest rule of the settings' producer wants for a candidate, with what there is; '' where it has none."""
    names = list(candidate.format.params)
    rules = [rule for rule in candidate.format.detect.get("config", ()) if is_same(rule.get("quant_method"), settings.get(
        "quant_method")) and rule.get("storage", candidate.fit.storage) == candidate.fit.storage]
    keys = {id(rule): unmet(rule, names, settings) for rule in rules}
    if not rules:
        return ""
    rule = min(rules, key=lambda rule: len(keys[id(rule)]))
    words = {key: rule[key] if isinstance(rule[key], list) else [rule[key]] for key in keys[id(rule)]}
    needs = [f"{key} = {join_names([str(candidate.fit.params.get(word, word)) for word in own], 'or')} in place of {value}"
             for key, own in words.items() for value in ["null" if at(settings, key) is None else at(settings, key)]]
    return f", which needs {' and '.join(needs)}" if needs else ""


def _deciding_settings_text(formats: Sequence[Description], settings: Mapping[str, Any]) -> str:
    """The settings that a producer's rules choose a storage by, as text; '' for qdsl's own, and where no producer is known.

    Those of the rules that match; of all the producer's rules where none does.
    """
    if is_same(settings.get("quant_method"), OWN):
        return ""
    every = [(rule, bool([*readings([rule], list(format.params), settings)])) for format in formats
             for rule in format.detect.get("config", ()) if is_same(rule.get("quant_method"), settings.get("quant_method"))]
    rules = [rule for rule, matches in every if matches] or [rule for rule, _ in every]
    values = {key: value for rule in rules for key in rule if key not in ABOUT_RULE
              for value in [at(settings, key)] if value is not None and not isinstance(value, Mapping)}
    return ", ".join(f"{key} = {value}" for key, value in {**values, **_lists(settings)}.items())


def _lists(settings: Mapping[str, Any]) -> dict[str, str]:
    """Lists of settings in settings, in a few words."""
    return {f"{key}.{name}": f"a list of {len(own)}" for key, value in settings.items() if isinstance(value, Mapping)
            for name, own in value.items() if isinstance(own, list) and any(isinstance(one, Mapping) for one in own)}


def brief(settings: Mapping[str, Any]) -> str:
    """The settings about quantized weights, in a few words."""
    plain = {key: value for key, value in settings.items() if isinstance(value, int | str | bool) and value not in (None, "")}
    return ", ".join(f"{key} = {value}" for key, value in [*list(plain.items())[:6], *_lists(settings).items()])


def _usual_words(candidate: Candidate) -> dict[str, int]:
    """Tensors of a candidate with the word that typically fills them."""
    for rule in candidate.format.detect.get("words", []):
        words = {own: int(str(word), 16) for own, word in rule.items() if own in candidate.fit.tensors}
        if rule.get("storage") == candidate.fit.storage and all(
                candidate.fit.params.get(name, value) == value for name, value in rule.items() if name not in words):
            return words
    return {}


def _is_padded(best: Candidate, storage: str, candidates: Sequence[Candidate]) -> bool:
    """Whether a stated storage, which does not say N and K, has the same words padded, so that no number is another."""
    if any(candidate.fit.storage == storage for candidate in candidates):
        return False
    own = best.format.layout(best.fit.storage, best.fit.params)
    return any({name: stored.dtype for name, stored in storages[storage].items()} == {
        name: stored.dtype for name, stored in own.items()} for storages in best.format.variants.values() if storage in storages)


def _is_index(best: Candidate, tensor: str, sources: Container[str]) -> bool:
    """Whether a tensor of the storage assigns columns to groups, and it or its field is one of the sources."""
    stored = best.format.layout(best.fit.storage, best.fit.params)[tensor]
    return stored.dtype == "index" and (tensor in sources or stored.optional in sources)


def _lacks_index(best: Candidate, uses: Container[str], field: str) -> str:
    """The tensor that would assign columns to several groups, and is not there; '' if there is none."""
    layout = best.format.layout(best.fit.storage, best.fit.params)
    is_several = 0 < int(best.fit.params.get("group", 0)) < best.fit.shape[1]
    return next((name for name, stored in layout.items() if is_several and stored.dtype == "index"
                 and stored.optional == field and name not in uses), "")


def _oddness(candidate: Candidate) -> tuple[bool, int]:
    """A sort key for equally fitting formats: exact tensor shapes first, then no blocks, then a single scale."""
    return not candidate.fit.exact, len(candidate.format.sizes)


def _with_defaults(pool: Sequence[Candidate]) -> Candidate | None:
    """The only candidate, or the one whose undetermined parameters have defaults."""
    params = pool[0].format.params
    if any(candidate.format is not pool[0].format for candidate in pool):
        return None
    values = {name: list(dict.fromkeys(candidate.fit.params[name] for candidate in pool)) for name in params}
    wanted = {name: resolve_default(choices, params[name][0]) for name, choices in values.items()}
    return next((candidate for candidate in pool if candidate.fit.params == wanted), None)
