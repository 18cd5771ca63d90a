"""What the launches of GATES come to on an architecture, as JSON: `python -m tests.kernels.gate_kernels sm_90`.

Kernels are those that the dispatcher picks for a large layer on a device of that kind.  Triton must not be interpreting.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.gpu import regimes
from qdsl.analyze import report
from qdsl.analyze.gpus import arch_of
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import configure, launch
from qdsl.runtime.libraries.call import Call
from tests.support.covering import quarter_of
from tests.support.formats import EXTRA, SHIPPED, module

TYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
SHAPES = {"sm_80": (4096, 4096), "sm_90": (8192, 8192), "sm_100": (8192, 8192)}        # shapes that benchmarks time


@dataclass(frozen=True)
class Gate:
    """At most so many instructions of a thread per weight in the hot loop, by the type of x."""

    format: str
    storage: str
    rows: int
    limits: tuple[tuple[str, float], ...]
    params: tuple[tuple[str, int | str], ...] = ()
    archs: tuple[str, ...] = ("sm_80", "sm_90", "sm_100")
    shape: tuple[int, int] | None = None                         # another layer than SHAPES'

    def __str__(self) -> str:
        return f"{self.format}.{self.storage}-{self.rows}" + (f"-{self.shape[0]}x{self.shape[1]}" if self.shape else "")

    def limits_on(self, arch: str) -> tuple[tuple[str, float], ...]:
        """Those of an architecture; of all but sm_90, for the time that compiling takes, those of the last type alone."""
        return () if arch not in self.archs else self.limits if arch == "sm_90" else self.limits[-1:]

    @property
    def kernel(self) -> str:
        """Which kernel of the storage it is that the dispatcher should pick."""
        if self.rows > 8:
            return "tile_gemm"
        if self.rows > 1 or self.format not in ROWWISE:
            return "skinny"
        return "gemv_records" if self.storage == "gguf" else "gemv"


ROWWISE = ("q4_0", "int4_rows", "q4_k", "q6_k", "q8_0", "int_group", "iq4_nl", "iq4_xs", "nf4", "bnb_fp4", "iq3_xxs", "mxfp4")
GATES = (
    Gate("q4_0", "planar", 1, (("f16", 1.30), ("bf16", 1.50))),
    Gate("int4_rows", "planar", 1, (("f16", 1.25), ("bf16", 1.50))),
    Gate("q4_0", "planar", 8, (("f16", 2.3), ("bf16", 2.0))),
    Gate("int4_rows", "planar", 8, (("f16", 2.8), ("bf16", 2.8))),
    Gate("int8_channel", "safetensors", 1, (("f16", 2.1), ("bf16", 2.9))),
    Gate("fp8_block", "safetensors", 1, (("f16", 2.5), ("bf16", 3.0))),
    Gate("q4_k", "planar", 1, (("f16", 1.9),)),
    Gate("q4_k", "planar", 8, (("bf16", 3.7),)),
    Gate("q4_k", "planar", 64, (("bf16", 10.3),), archs=("sm_90",)),
    Gate("q4_k", "gguf", 1, (("f16", 2.0), ("bf16", 2.2))),
    Gate("q6_k", "planar", 1, (("f16", 2.8),)),
    Gate("iq4_nl", "planar", 1, (("f16", 2.4), ("bf16", 2.4))),
    Gate("iq4_xs", "planar", 1, (("f16", 2.6), ("bf16", 2.6))),
    Gate("nf4", "planar", 1, (("f16", 3.2), ("bf16", 2.8)), archs=("sm_80", "sm_100")),
    Gate("nf4", "planar", 1, (("f16", 3.2), ("bf16", 2.95)), archs=("sm_90",)),            # one tile of rows, because two spill
    Gate("bnb_fp4", "planar", 1, (("f16", 2.7), ("bf16", 2.7))),
    Gate("iq3_xxs", "planar", 1, (("f16", 2.3), ("bf16", 2.3))),
    Gate("mxfp4", "planar", 1, (("bf16", 2.0),)),
    Gate("int4_rows", "planar", 16, (("f16", 2.8), ("bf16", 2.8)), archs=("sm_90",)),
    Gate("int4_channel", "planar", 128, (("f16", 3.0), ("bf16", 3.0)), archs=("sm_90",), shape=(28672, 8192)),
    # A scale in the operand would make it 2.6, and overflow float16 from code * scale = 65520 on; sums do not.
    Gate("int4_rows", "planar", 128, (("f16", 3.1), ("bf16", 3.4)), archs=("sm_90",), shape=(28672, 8192)),
    # No figure of these is promised; a change that makes them worse should be seen.
    Gate("q8_0", "planar", 1, (("f16", 1.5),)),
    Gate("int_group", "planar", 1, (("f16", 1.5), ("bf16", 1.7))),
    Gate("int4_rows", "planar", 64, (("f16", 3.2), ("bf16", 3.6)), archs=("sm_90",)),
    Gate("int4_rows", "planar", 128, (("f16", 3.6), ("bf16", 3.8)), archs=("sm_90",)),
)
# What `python -m bench.versions` counts: formats in use, one row of x, 8 and 64, without limits.
LEADING = tuple(Gate(name, storage, rows, tuple((kind, math.inf) for kind in TYPES)) for name, storage in (
    ("q4_0", "planar"), ("q4_k", "planar"), ("int_group", "planar"), ("nf4", "planar"), ("mxfp4", "planar"),
    ("fp8_block", "safetensors")) for rows in (1, 8, 64))


def gates_of(arch: str) -> list[Gate]:
    """Half of the gates in turn, another half for another architecture."""
    return quarter_of(GATES if arch == "sm_90" else GATES[1:])


def weight(gate: Gate, shape: tuple[int, int]) -> PackedWeight:
    """A weight on the meta device, without the tensors that may be missing."""
    path: Path = next(path for path in (*SHIPPED, *EXTRA) if path.stem == gate.format)
    packed: PackedWeight = module(path).FORMAT.empty(shape, gate.storage, **dict(gate.params))
    return packed


def shuffles(call: Call) -> int:
    """How many shuffles of an iteration find the largest numbers of runs of x: two per run, of kernels that scale x."""
    return 2 * (32 // min(32, call.constants["STEP"])) if call.constants.get("LIFT") else 0


def every(arch: str, gates: Sequence[Gate] = GATES) -> list[dict[str, object]]:
    """What the kernels of gates come to."""
    rows: list[dict[str, object]] = []
    with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
        for gate in gates:
            packed = weight(gate, gate.shape or SHAPES[arch])
            for kind, limit in gate.limits_on(arch):
                x, out = (torch.empty(gate.rows, size, dtype=TYPES[kind], device="meta") for size in reversed(packed.shape))
                for call in launch.linear_calls(x, packed, None, out, candidate=regimes.candidate(x, packed)):
                    counts = asdict(report(call, arch))
                    del counts["listing"]
                    rows.append({"gate": str(gate), "x": kind, "limit": limit, "picked": gate.kernel,
                                 "shuffles": shuffles(call), **counts})
    return rows


def main() -> None:
    print(json.dumps(every(sys.argv[1], gates_of(sys.argv[1]))))


if __name__ == "__main__":
    main()
