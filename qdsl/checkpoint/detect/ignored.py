"""The dialects of layer patterns in configs, which name layers with other settings or without quantization.

Producers interpret the same pattern differently:

    exact        the module's whole name
    substring    a part of its name
    transformers a regular expression at its start up to a dot or its end, or a plain name at its end (should_convert_module)
    regex        compressed-tensors: the whole name, or after 're:' a regular expression at its start
    glob         modelopt: a name with *, ? and [...]
    dynamic      GPTQ: after '-:' a regular expression at its start
    regex_or_glob  Quark: regex after 're:', else glob
    search       auto-round: a regular expression anywhere in the name
    suffix       GPTQ's modules_in_block_to_quantize: the last parts of the names of quantized modules
    tag          HQQ: the module's name without numbers, and without the parts 'model' and 'layers'
"""

from __future__ import annotations

import fnmatch
import importlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, lru_cache
from math import comb
from time import thread_time
from typing import Any

from qdsl.checkpoint.files.safetensors import CheckpointError, shown

LONGEST = 1000                                                   # most characters of a pattern
BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"                               # where transformers allows a part of a name to end
ANYWHERE = r"[\s\S]*?"                                          # what precedes an expression that is searched for
COST = 1 << 24                                                   # ways to match that take some hundredths of a second
COMPILED = 1 << 16                                               # ways that take as long as compiling an expression
CALL = 256                                                       # ways that take as long as a match that fails at once
SHORT, MOST_REPEATS = 32, 16                                     # patterns that are slow on a name this short are refused
UNTAGGED = ("model", "layers")                                   # parts of names that HQQ's tags leave out
FEW = 16                                                         # repeats of fewer characters count a way for each
SECONDS, SECONDS_A_NAME = 0.3, 2e-5                              # matching time for a folder, and for each of its tensors
# Modules that quantization skips, by a part of their names: heads, embeddings, norms, routers, and Mamba's dt_proj, which
# multiplies by the weight directly.
SKIPPED = ("lm_head", "output_projection", "embed.*", ".*embed(ding|dings|_tokens)?", "wte", "wpe", ".*norm.*", "ln_.*",
           "gate", "router", "shared_expert_gate", "score", "classifier", "dt_proj")
_parser: Any = importlib.import_module("re._parser")


class Budget:
    """The processor time for matching the patterns of one folder, spent in `with` blocks."""

    def __init__(self, names: int = 1 << 17) -> None:
        self.limit = SECONDS + SECONDS_A_NAME * names
        self._spent = self._began = self._cost = 0.0

    def __enter__(self) -> None:
        self._began = thread_time()

    def __exit__(self, *_: object) -> None:
        self._spent += thread_time() - self._began

    def charge(self, cost: float) -> None:
        """Raises CheckpointError if no time is left.  cost: ways to match that follow."""
        self._cost += cost
        if self._cost > COST:
            self._cost = cost
            if self._spent + thread_time() - self._began > self.limit:
                self._cost = math.inf
                raise CheckpointError(f"the patterns that name layers in the configs take over {self.limit:.1f} s to match; list "
                                      "the names of layers")


@dataclass(frozen=True, slots=True)
class Rule:
    """An entry of a config's list, and the dialect in which it is read."""

    dialect: str
    pattern: str

    def matches(self, module: str) -> bool:
        """Whether the entry names a module.  Raises CheckpointError for an invalid or slow regular expression."""
        if self.dialect == "exact":
            return self.pattern == module
        if self.dialect == "substring":
            return self.pattern in module
        if self.dialect == "suffix":
            return module == self.pattern or module.endswith("." + self.pattern)
        if self.dialect == "tag":
            return self.pattern == ".".join(part for part in module.split(".") if part not in UNTAGGED and not part.isnumeric())
        if self.dialect == "glob":
            return fnmatch.fnmatchcase(module, self.pattern)
        if self.dialect == "transformers":
            return module.endswith(self.pattern) or expression(self.pattern, BOUNDARY).match(module)
        if self.dialect == "search":
            return expression(self.pattern, start=ANYWHERE).match(module)
        if self.dialect == "dynamic":
            return expression(self.pattern).match(module)
        return expression(self.pattern[3:]).match(module) if self.pattern.startswith("re:") else self.pattern == module

    def cost(self, module: str) -> float:
        """An upper bound of the ways to match a module."""
        if self.dialect == "glob":
            return CALL + len(self.pattern) * len(module)
        if self.dialect == "search":
            return expression(self.pattern, start=ANYWHERE).cost(len(module)) * (len(module) + 1)
        if self.dialect in ("transformers", "dynamic", "regex"):
            return expression(self.pattern.removeprefix("re:") if self.dialect == "regex" else self.pattern,
                              BOUNDARY if self.dialect == "transformers" else "").cost(len(module))
        return CALL

    def __str__(self) -> str:
        return f"{self.pattern} ({self.dialect})"


@dataclass(slots=True)
class Rules:
    """A list of rules; `problems` has those that cannot be parsed."""

    rules: list[Rule]
    problems: list[str] = field(default_factory=list)
    budget: Budget = field(default_factory=Budget)
    _exact: dict[str, Rule] = field(default_factory=dict)
    _others: list[Rule] = field(default_factory=list)
    _costs: dict[int, float] = field(default_factory=dict)       # of all other rules, by the length of a name

    def __post_init__(self) -> None:
        for rule in self.rules:
            plain = rule.dialect == "exact" or (rule.dialect == "regex" and not rule.pattern.startswith("re:"))
            self.budget.charge(COMPILED)
            try:
                rule.matches("")
            except CheckpointError as error:
                self.problems.append(str(error))
                continue
            if plain:
                self._exact.setdefault(rule.pattern, rule)
            else:
                self._others.append(rule)

    def first(self, module: str) -> Rule | None:
        """The first rule that names a module, or None."""
        self.budget.charge(CALL)
        if module in self._exact:
            return self._exact[module]
        length, is_short = len(module), len(self._others) <= FEW
        if is_short and length not in self._costs:
            self._costs[length] = sum(rule.cost(module) for rule in self._others)
        if is_short:
            self.budget.charge(self._costs[length])
        for rule in self._others:
            if not is_short:
                self.budget.charge(rule.cost(module))
            if rule.matches(module):
                return rule
        return None


def rules(dialect: str, patterns: object, budget: Budget | None = None) -> Rules:
    """The rules of a list in a config, or of a single entry; other values are problems."""
    listed = patterns if isinstance(patterns, list) else [patterns]
    names = [pattern for pattern in listed if isinstance(pattern, str)]
    others = [pattern for pattern in listed if not isinstance(pattern, str)]
    own = {name: dialect if dialect != "regex_or_glob" else "regex" if name.startswith("re:") else "glob"
           for name in names if name}
    return Rules([Rule(dialect, name) for name, dialect in own.items()],
                 [f"{shown(str(pattern))} stands for the name of a layer, and is none" for pattern in others], budget or Budget())


def is_skipped(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the whole name of a module, or a part of it between dots."""
    names = {name, *name.split(".")}
    return any(pattern.fullmatch(part) for pattern in _compiled(tuple(patterns)) for part in names)


def unmatched(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Notes on patterns, as `is_skipped` reads them, that match none of the modules."""
    left, parts = dict.fromkeys(patterns), set[str]()
    for name in names:
        parts |= {name, *name.split(".")}
        left = {pattern: None for pattern in left if not is_skipped(name, [pattern])}
        if not left:
            break
    near = {pattern: get_close_matches(pattern, parts, n=1) for pattern in left}
    return [f"the pattern {shown(pattern)} names no layer" + "".join(f"; did you mean {shown(name)}?" for name in near[pattern])
            for pattern in left]


@cache
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, patterns))


@dataclass(frozen=True, slots=True)
class Expression:
    """A regular expression from a config.  repeats: the number of single-character repeats; ways: to match everything else."""

    pattern: re.Pattern[str]
    repeats: int
    ways: float

    def cost(self, length: int) -> float:
        """An upper bound of the ways to match a text of this length."""
        return CALL + self.ways * comb(length + self.repeats, self.repeats)

    def match(self, text: str, whole: bool = False) -> bool:
        """Whether it matches the start of a text, or all of it.  Raises CheckpointError if that could be slow."""
        if self.cost(len(text)) > COST:
            raise CheckpointError(f"the regular expression {shown(self.pattern.pattern)} may take too long, and is not used")
        return (self.pattern.fullmatch if whole else self.pattern.match)(text) is not None


@lru_cache(1 << 14)
def expression(pattern: str, ending: str = "", start: str = "") -> Expression:
    """A regular expression from a config, with a suffix, or with what precedes it in a name.

    Raises CheckpointError for one that is slow on any name.
    """
    try:
        repeats, ways = _repeats_and_ways(_parser.parse(pattern)) if len(pattern) <= LONGEST else (0, math.inf)
        if repeats <= MOST_REPEATS and ways * comb(SHORT + repeats, repeats) <= COST:
            return Expression(re.compile(f"{start}(?:{pattern}){ending}" if start or ending else pattern), repeats, ways)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{shown(pattern)} is not a regular expression: {error}") from None
    raise CheckpointError(f"the regular expression {shown(pattern)} may take too long, and is not used")


def _repeats_and_ways(items: Iterable[tuple[Any, Any]]) -> tuple[int, float]:
    """The number of single-character repeats, as in an Expression, and an upper bound of the ways to match everything else."""
    repeats, total = 0, 1.0
    for code, value in items:
        name = str(code)
        inner: tuple[int, float] = (0, 1.0)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, part = value
            inner = _repeats_and_ways(part)
            if len(part) == 1 and str(part[0][0]) in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
                inner = (1, 1.0) if int(most) - int(least) >= FEW else (0, int(most) - int(least) + 1.0)
            elif int(most) > 1:
                return 0, math.inf
            else:
                inner = inner[0], 1 + inner[1]
        elif name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT", "ATOMIC_GROUP"):
            inner = _repeats_and_ways(value if name == "ATOMIC_GROUP" else value[-1])
        elif name == "BRANCH":
            branches = [_repeats_and_ways(branch) for branch in value[1]]
            inner = max(repeats for repeats, _ in branches), sum(ways for _, ways in branches)
        elif name in ("GROUPREF", "GROUPREF_EXISTS", "GROUPREF_IGNORE"):
            return 0, math.inf
        repeats, total = repeats + inner[0], total * inner[1]
    return repeats, total
