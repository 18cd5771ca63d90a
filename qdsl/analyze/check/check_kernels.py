"""Triton's kernels of a format against its reference, in Triton's interpreter.

Tiles of many rows are for GPUs alone, and do not run here.  The interpreter is chosen before Triton is imported, so
`check_kernels` starts a process: `python -m qdsl.analyze.check.check_kernels`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

import qdsl
from qdsl.analyze.check.cases import StorageCase, storage_cases
from qdsl.analyze.check.compare import describe_difference
from qdsl.analyze.check.formats import Check, run_check
from qdsl.compiler.spec.model import Spec
from qdsl.compiler.spec.schema import load
from qdsl.core import places
from qdsl.runtime import PackedWeight
from qdsl.runtime.format import Format
from qdsl.runtime.gpu import launch, plan
from qdsl.runtime.gpu.costs import Candidate
from qdsl.runtime.gpu.families import ANY_GPU
from qdsl.runtime.gpu.kernels import codebook, lanes
from qdsl.runtime.libraries.triton import is_installed, tl


def check_kernels(spec: str) -> Iterator[Check]:
    """Checks the kernels of a spec, a file or the name of one that ships, in a process of its own."""
    if not is_installed:
        yield Check("", {}, "kernels", "skipped", "Triton is not installed, so no kernel was run")
        return
    path = os.pathsep.join(filter(None, (str(Path(qdsl.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "qdsl.analyze.check.check_kernels", spec]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield Check(**json.loads(line))
    if process.returncode:
        yield Check("", {}, "kernels", "FAILED", f"the process that runs kernels ended with exit code {process.returncode}")


def check_interpreted(spec: Spec, format: Format) -> Iterator[Check]:
    """Checks every storage at every choice of parameters; TRITON_INTERPRET is set."""
    for case in storage_cases(spec, format):
        if case.smallest is not None:
            yield run_check(case, "dequantize kernel", check_dequantize)
            yield run_check(case, "linear kernel", check_linear)


def check_dequantize(case: StorageCase) -> tuple[str, str]:
    """The dequantize kernel gives the bits of the reference: in float32, and rounded once in float16."""
    shapes = case.test_shapes(2)
    for seed, shape in enumerate(shapes):
        packed = _packed(case, shape, seed)
        for dtype in (torch.float32, torch.float16)[:1 + (seed == 0)]:
            out = torch.full(shape, torch.nan, dtype=dtype, device="cpu")
            launch.dequantize(packed, out)                       # decodes streams, too
            if problem := describe_difference(out, case.format.dequantize(packed, dtype), packed, case.spec):
                return f"{list(shape)} to {str(dtype)[6:]}: {problem}", ""
    return "", f"exact at {', '.join(f'{n}x{k}' for n, k in shapes)}"


def check_linear(case: StorageCase) -> tuple[str, str]:
    """The linear kernels read every weight at its place, and sums are as exact as float32 allows."""
    shapes = [shape for shape in case.test_shapes(2) if 0 not in shape]
    for seed, shape in enumerate(shapes):
        packed = _packed(case, shape, seed).decode_streams()
        weight = case.format.dequantize(packed, torch.float32)
        columns = sorted({0, 1, shape[1] // 2, shape[1] - 1} & set(range(shape[1])))
        x = torch.zeros(len(columns), shape[1], dtype=torch.float32, device="cpu")
        x[range(len(columns)), columns] = 1
        got = weight.clone()
        got[:, columns] = _run_linear(x, packed, None).t() + 0.0
        if problem := describe_difference(got + 0.0, weight + 0.0, packed, case.spec):   # + 0.0: sums have no negative zero
            return f"{list(shape)}, x of one-hot rows: {problem}", ""
        for rows, dtype in ((1, torch.float16), (9, torch.float16), (3, torch.float32)):
            candidates = plan.candidates(packed, rows, dtype, packed.device)
            kinds = {candidate.kind: candidate for candidate in reversed(candidates) if candidate.kind != "decode"}
            for candidate in kinds.values():
                if problem := _sums_problem(packed, weight.double(), rows, dtype, candidate):
                    return f"{list(shape)}, {candidate.kind} of x {str(dtype)[6:]} [{rows}, {shape[1]}]: {problem}", ""
    return "", f"within rounding at {', '.join(f'{n}x{k}' for n, k in shapes)}"


def _sums_problem(packed: PackedWeight, weight: Tensor, rows: int, dtype: torch.dtype, candidate: Candidate) -> str:
    """The results of x @ w.T + bias whose error exceeds that of float32 sums of K terms and one rounding; '' if none do."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, packed.shape[1], generator=generator, dtype=torch.float32, device="cpu")
    x = (x / 256).to(dtype)                                      # so that float16 holds the sums
    bias = torch.randn(packed.shape[0], generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    got = _run_linear(x, packed, bias, candidate).double()
    wanted = x.double() @ weight.t() + bias.double()
    spread = x.double().abs() @ weight.abs().t() + bias.double().abs()
    kernels = packed.layout.kernels
    rounds = candidate.kind == ANY_GPU.name or (                 # weights, numbers of tables, or x
        kernels.matrix_unit and (kernels.rounds_tables(dtype, packed.tensors) or packed.layout.factor))
    rounded = torch.finfo(dtype).eps / 2 if rounds else 0
    bound = spread * ((packed.shape[1] + 2) * 2.0 ** -24 + rounded) + wanted.abs() * torch.finfo(dtype).eps / 2
    wrong = ~((got - wanted).abs() <= bound + torch.finfo(dtype).tiny)
    if not wrong.any():
        return ""
    m, n = (int(place) for place in wrong.nonzero()[0])
    return (f"{int(wrong.sum())} of {wrong.numel()} sums are wrong; first [{m}, {n}]: {got[m, n]:.9g} instead of "
            f"{wanted[m, n]:.9g}")


def _packed(case: StorageCase, shape: tuple[int, int], seed: int) -> PackedWeight:
    return case.format.pack(case.fields(shape, seed), storage=case.storage, **case.params)


def _run_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, candidate: Candidate | None = None) -> Tensor:
    out = torch.full((x.shape[0], packed.shape[0]), torch.nan, dtype=x.dtype, device="cpu")
    for call in launch.linear_calls(x, packed, bias, out, candidate=candidate):
        call.run()
    return out


def byte_perm(first: tl.tensor, second: tl.tensor | int, selectors: tl.tensor | int) -> tl.tensor:
    """libdevice.byte_perm in plain Triton: byte i is that of (first, second) which bits 4i to 4i + 2 of selectors number."""
    bytes = None
    for i in range(4):
        place = (selectors >> (4 * i)) & 7
        byte = (tl.where(place < 4, first, second) >> ((place & 3) * 8)) & 255
        bytes = byte if bytes is None else bytes | (byte << (8 * i))
    return bytes


def print_checks(name: str) -> None:
    """Prints a line of JSON for each check of the kernels of a spec."""
    spec = load(places.find_spec(name), name if Path(name).is_file() else None)
    # The interpreter has no functions of NVIDIA's libdevice, and no assembly.
    codebook.libdevice = SimpleNamespace(byte_perm=byte_perm)    # type: ignore[attr-defined]
    codebook.permute, lanes.scaled = codebook.plain_permute, lanes.plain_scaled
    with torch.no_grad():
        for outcome in check_interpreted(spec, qdsl.load(name).FORMAT):
            print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    print_checks(sys.argv[1])
