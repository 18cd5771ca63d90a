"""Chooses types of tensors for the least cost within a number of bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from qdsl.jobs.gguf import QuantizeError
from qdsl.jobs.gguf.mixes import EMBEDDINGS, OUTPUT, Options, Tensor, fitting, type_named
from qdsl.jobs.gguf.plan_file import Plan
from qdsl.jobs.gguf.run import quantizer_of

TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")         # that every program computes fast


@dataclass(frozen=True, slots=True)
class Choice:
    """A type that a tensor may have, its bytes, and what it costs: nats per token."""

    type: str
    nbytes: int
    cost: float


def types_of(text: str | None) -> tuple[str, ...]:
    """Parses types with commas between; those of TYPES for None.  Raises QuantizeError for unknown ones."""
    return TYPES if text is None else tuple(type_named(name.strip()) for name in text.split(","))


def candidates(tensor: Tensor, types: Sequence[str], options: Options) -> list[str]:
    """The types that a tensor may have: those whose blocks divide its rows, others by `fitting`; none where a user chose."""
    is_chosen = options.override(tensor.name) is not None or (tensor.name == OUTPUT and options.output) or (
        tensor.name in EMBEDDINGS and options.embedding)
    every = dict.fromkeys(fitting(tensor, type).type for type in types)
    return [] if is_chosen else [type for type in every if quantizer_of(type) is not None]


def choose(choices: Mapping[str, Iterable[Choice]], nbytes: int) -> dict[str, str]:
    """The type of each tensor, for the least sum of costs within a number of bytes.

    Starts with the smallest types, and takes the step that saves most for each byte, as long as there is one that fits.  Raises
    QuantizeError where the smallest do not fit.
    """
    hulls = {name: list(_hull(some)) for name, some in choices.items()}
    chosen = dict.fromkeys(hulls, 0)
    left = nbytes - sum(hull[0].nbytes for hull in hulls.values())
    if left < 0:
        raise QuantizeError(f"the smallest types of {len(hulls)} tensors take {nbytes - left} bytes, of {max(0, nbytes)} that "
                            "--target-bits leaves for them")
    steps = [(_slope(before, after), name, place) for name, hull in hulls.items()
             for place, (before, after) in enumerate(pairwise(hull))]
    for _, name, place in sorted(steps):
        hull = hulls[name]
        added = hull[place + 1].nbytes - hull[chosen[name]].nbytes
        if added <= left:
            chosen[name], left = place + 1, left - added
    return {name: hulls[name][place].type for name, place in chosen.items()}


def _hull(choices: Iterable[Choice]) -> Iterator[Choice]:
    """The choices of least cost for some price of bytes, the smallest first: the lower convex hull of costs over bytes."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.nbytes, choice.cost)):
        if hull and choice.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _slope(hull[-1], choice) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(choice)
    yield from hull


def _slope(before: Choice, after: Choice) -> float:
    """How much the cost changes for each byte, where a larger type takes the place of another."""
    return (after.cost - before.cost) / (after.nbytes - before.nbytes)


def within(plan: Plan, costs: Mapping[str, Mapping[str, float]], bits: float, options: Options) -> Options:
    """The options with types for the tensors that have costs, so that the whole file has at most so many bits per weight.

    Raises QuantizeError where it cannot.
    """
    tensors = {step.tensor.name: step.tensor for step in plan.steps}
    choices = {name: [Choice(type, replace(tensors[name], type=type).nbytes, cost) for type, cost in own.items()]
               for name, own in costs.items()}
    left = int(bits * plan.weights / 8) - sum(step.nbytes for step in plan.steps if step.tensor.name not in choices)
    types = choose(choices, left)
    return replace(options, overrides=(*options.overrides, *((re.compile(rf"^{re.escape(name)}$"), type)
                                                             for name, type in types.items())))
