"""x @ w.T on a CPU with one row of x, one thread: what torch takes where there is no C compiler, beside compiled loops.

Weights that torch's own kernels take are measured with these and, for comparison, as tiles, which serve every other weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from bench import linear
from bench.figure import Figure, ratios
from bench.timing import Side, calls
from bench.weights import packed, titled

WEIGHTS = ("q4_0 gguf", "q8_0", "q4_k", "q6_k", "fp8_block safetensors", "int8_channel safetensors", "int_group bits=4 gptq_v2")


def figures(rounds: int) -> Iterator[Figure]:
    """The time of the product by torch as a multiple of the compiled one's; the notes have milliseconds."""
    for what, name, storage, params in titled(WEIGHTS):
        arguments = {"name": name, "storage": storage, "params": params, "rows": 1, "threads": 1}
        sides = {"compiled": Side(linear.ours, {**arguments, "compiled": True}),
                 "tiles": Side(linear.ours, {**arguments, "compiled": False})}
        if what.startswith("int8_channel"):
            sides["torch's int8 kernel"] = Side(without_compiler, arguments)
        if (name, storage, params) == linear.FUSED:
            sides["torch's int4 operation"] = Side(linear.fused, arguments)
        compiled, *others = calls(list(sides.values()), rounds, same=False)
        copies = linear._copies(packed(name, storage, **params).nbytes)
        for way, seconds in zip(list(sides)[1:], others, strict=True):
            own, base = (1000 * Figure("", "s", times).median / copies for times in (seconds, compiled))
            yield Figure(f"linear {what}, M = 1, {way}, time to compiled", "x", ratios(seconds, compiled), more=False,
                         note=f"{own:.2f} ms; compiled {base:.2f} ms")


def without_compiler(**arguments: Any) -> Callable[[], Tensor]:
    """This project's linear on a machine without a C compiler."""
    from qdsl.host import library

    def compiler() -> tuple[str, ...]:
        raise library.NoCompiler("no C compiler")

    library.compiler = compiler  # type: ignore[assignment]
    return linear.ours(compiled=True, **arguments)
