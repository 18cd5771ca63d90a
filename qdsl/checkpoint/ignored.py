"""The dialects in which configs name layers that are quantized otherwise, or not at all.

Each producer reads its list in its own way, and the same word means different layers:

    exact        the module's whole name
    substring    a part of its name
    transformers a regular expression at its start up to a dot or its end, or a plain name at its end (should_convert_module)
    regex        compressed-tensors: the whole name, or after 're:' a regular expression at its start
    glob         modelopt: a name with *, ? and [...]
    dynamic      GPTQ: after '-:' a regular expression at its start
    suffix       GPTQ's modules_in_block_to_quantize: the last parts of the names of those that are quantized
"""

from __future__ import annotations

import fnmatch
import importlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from qdsl.checkpoint.safetensors import CheckpointError, shown

LONGEST = 1000                                                   # characters of a pattern
BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"                               # where transformers lets a part of a name end
COST = 1 << 24                                                   # steps that a pattern may take on a name of 64 characters
# Modules that quantizing leaves plain, by a part of their names: heads, embeddings, norms, routers, and the dt_proj of Mamba,
# which multiplies by the weight itself.
SKIPPED = ("lm_head", "output_projection", "embed.*", ".*embed(ding|dings|_tokens)?", "wte", "wpe", ".*norm.*", "ln_.*",
           "gate", "router", "shared_expert_gate", "score", "classifier", "dt_proj")
_parser: Any = importlib.import_module("re._parser")


@dataclass(frozen=True, slots=True)
class Rule:
    """An entry of a config's list, and the dialect in which it is read."""

    dialect: str
    pattern: str

    def matches(self, module: str) -> bool:
        """Whether it names a module.  Raises CheckpointError for a regular expression that is none, or would take too long."""
        if self.dialect == "exact":
            return self.pattern == module
        if self.dialect == "substring":
            return self.pattern in module
        if self.dialect == "suffix":
            return module == self.pattern or module.endswith("." + self.pattern)
        if self.dialect == "glob":
            return fnmatch.fnmatchcase(module, self.pattern)
        if self.dialect == "transformers":
            return module.endswith(self.pattern) or expression(self.pattern, BOUNDARY).match(module) is not None
        if self.dialect == "dynamic":
            return expression(self.pattern).match(module) is not None
        if self.pattern.startswith("re:"):
            return expression(self.pattern[3:]).match(module) is not None
        return self.pattern == module

    def __str__(self) -> str:
        return f"{self.pattern} ({self.dialect})"


@dataclass(slots=True)
class Rules:
    """A list of rules; those that cannot be read are in `problems`, once each."""

    rules: list[Rule]
    problems: list[str] = field(default_factory=list)
    _exact: dict[str, Rule] = field(default_factory=dict)
    _others: list[Rule] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rule in self.rules:
            plain = rule.dialect == "exact" or (rule.dialect == "regex" and not rule.pattern.startswith("re:"))
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
        """The rule that names a module."""
        return self._exact.get(module) or next((rule for rule in self._others if rule.matches(module)), None)


def rules(dialect: str, patterns: object) -> Rules:
    """The rules of a list in a config, or of one that stands there by itself; whatever else stands there is a problem."""
    found = patterns if isinstance(patterns, list) else [patterns]
    names = [each for each in found if isinstance(each, str)]
    others = [each for each in found if not isinstance(each, str)]
    return Rules([Rule(dialect, name) for name in names if name],
                 [f"{shown(str(each))} stands for the name of a layer, and is none" for each in others])


def is_skipped(name: str, patterns: Sequence[str]) -> bool:
    """Whether a regular expression is the whole name of a module, or of a part of it between dots."""
    names = {name, *name.split(".")}
    return any(pattern.fullmatch(part) for pattern in _compiled(tuple(patterns)) for part in names)


@cache
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, patterns))


@cache
def expression(pattern: str, ending: str = "") -> re.Pattern[str]:
    """A stranger's regular expression, which cannot take long on a name, with an ending of ours.  Raises CheckpointError."""
    try:
        steps = _steps(_parser.parse(pattern)) if len(pattern) <= LONGEST else COST + 1
        if steps <= COST:
            return re.compile(f"(?:{pattern}){ending}" if ending else pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{shown(pattern)} is not a regular expression: {error}") from None
    raise CheckpointError(f"the regular expression {shown(pattern)} may take too long, and is not used")


def _steps(items: Iterable[tuple[Any, Any]]) -> float:
    """At most how many ways there are to match a name of 64 characters."""
    total = 1.0
    for code, value in items:
        name = str(code)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, inner = value
            single = len(inner) == 1 and str(inner[0][0]) in ("LITERAL", "NOT_LITERAL", "ANY", "IN")
            ways = _steps(inner)
            total *= min(64, int(most) - int(least) + 1) if single else (1 + ways) if int(most) == 1 else float("inf")
        elif name == "SUBPATTERN":
            total *= _steps(value[3])
        elif name in ("ASSERT", "ASSERT_NOT"):
            total *= _steps(value[1])
        elif name == "ATOMIC_GROUP":
            total *= _steps(value)
        elif name == "BRANCH":
            total *= sum(_steps(branch) for branch in value[1])
        elif name in ("GROUPREF", "GROUPREF_EXISTS", "GROUPREF_IGNORE"):
            return float("inf")
    return total
