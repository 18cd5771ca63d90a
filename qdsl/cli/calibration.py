"""The options of `quantize` that run a model on a text first."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from qdsl.cli.app import fail, needs, reported
from qdsl.cli.options import refuse_options

if TYPE_CHECKING:
    from qdsl.jobs.calibrate import Sampling
    from qdsl.jobs.convert.target import Conversion
    from qdsl.jobs.gguf.mixes import Options
    from qdsl.jobs.gguf.plan_file import Plan
    from qdsl.jobs.gguf.run import Calibration
    from qdsl.jobs.gguf.source import Source

HEADING = "Calibration, with --calibrate"                        # of options in the help


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """A run of a model on a text before it is quantized.  device: that runs it.

    bits: of a weight, for which types are chosen, among `types`.
    """

    sampling: Sampling
    device: str | None
    bits: float | None = None
    types: str | None = None

    @classmethod
    def of(cls, context: typer.Context, text: Path | None, samples: int, length: int, method: str | None, sequential: bool,
           device: str | None, bits: float | None = None, types: str | None = None) -> CalibrationRun | None:
        """The run that options ask for; None without a text.  Exits with code 2 for options that do not fit."""
        if text is None:
            refuse_options(context, HEADING, "--calibrate")
            return None
        needs("running a language model", "models", "transformers")
        from qdsl.cli.models import check_length
        from qdsl.core.options import METHODS
        from qdsl.host.files import read_utf8
        from qdsl.jobs.calibrate import Sampling
        from qdsl.jobs.gguf.mixes import type_named

        if method is not None and method not in METHODS:
            fail(f"--method is {' or '.join(METHODS)}, not {method}", 2)
        if not text.is_file():
            fail(f"{text}: no such file of text", 2)
        with reported():
            check_length(read_utf8(text), length, "--length")
        if bits is not None and any(context.params.get(name) is not None for name in ("mix", "format")):
            fail("--target-bits chooses the types of a GGUF file itself: leave out --type and --format", 2)
        if types is not None and bits is None:
            fail("--types is for --target-bits", 2)
        with reported(2):
            for name in (types or "Q8_0").split(","):
                type_named(name.strip())
        return cls(Sampling(text, method or METHODS[0], samples, length, sequential), device, bits, types)

    def for_folder(self, model: Path, aim: Conversion) -> tuple[Conversion, Callable[[Path], None]]:
        """The aim with what the numbers depend on, and the function that writes moments into a folder."""
        from dataclasses import replace

        from qdsl.checkpoint.detect.ignored import is_skipped
        from qdsl.jobs.convert.target import target_format

        options = {**aim.options, "storage": aim.storage}

        def target(name: str) -> Any:
            return None if is_skipped(name, aim.ignore or ()) else (target_format(aim), options)

        with reported():
            return replace(aim, calibration=self.sampling.data()), partial(self._write, model, target, has_stored_names=True)

    def within_bits(self, bits: float, model: Path, source: Source, options: Options, requantize: bool, out: Path) -> Options:
        """The options with a type for each tensor, chosen by what types cost, for a file of at most so many bits per weight."""
        from qdsl.cli.models import running
        from qdsl.cli.progress import progress
        from qdsl.jobs.gguf import budget, plan_file
        from qdsl.jobs.type_costs import tensor_costs

        with running(), reported():
            planned, types = plan_file.plan(source, options, None, requantize), budget.types_of(self.types)
            tensors = [step.tensor for step in planned.steps if not step.copied]
            every = {tensor.name: budget.candidates(tensor, types, options) for tensor in tensors}
            budget.within(planned, {name: dict.fromkeys(own, 0.0) for name, own in every.items() if own}, bits, options)
            costs = tensor_costs(model, tensors, every, self.sampling, self._folder(model, out, None), progress, self.device)
            return budget.within(planned, costs, bits, options)

    def _folder(self, model: Path, out: Path, types: list[str] | None) -> Path:
        """Where moments of a model that is written to a GGUF file are; those of the plain model depend on no types."""
        from dataclasses import replace

        from qdsl.host.files import digest, identity

        files = [model] if model.is_file() else sorted(model.glob("*.safetensors"))
        sampling = self.sampling if types else replace(self.sampling, sequential=False)
        with reported():
            return moments_folder(out) / digest(sampling.data(), [identity(path) for path in files], types)[:16]

    def for_gguf(self, model: Path, plan: Plan, out: Path) -> Calibration:
        """The moments of a model's layers, written next to the GGUF file, and what they depend on."""
        from qdsl.encode.calibrated.store import Moments
        from qdsl.jobs.calibrate import tensor_layers
        from qdsl.jobs.gguf.run import Calibration, quantizer_of

        tensors = tensor_layers(model, [step.tensor for step in plan.steps if not step.copied])
        types = {name: step.type for step in plan.steps for name in tensors.get(step.tensor.name, ())}

        def target(name: str) -> Any:
            module = quantizer_of(types[name]) if name in types else None
            return None if module is None else (module.FORMAT, {})

        place = self._folder(model, out, [step.type for step in plan.steps] if self.sampling.sequential else None)
        self._write(model, target, place)
        measured = Moments(place)
        layers = {tensor: [name if name in measured else "" for name in names] for tensor, names in tensors.items()
                  if any(name in measured for name in names)}
        return Calibration(place, layers, place.name, self.sampling.method)

    def _write(self, model: Path, target: Callable[[str], Any], folder: Path, has_stored_names: bool = False) -> None:
        from qdsl.cli.models import running
        from qdsl.cli.progress import progress
        from qdsl.jobs.calibrate import write_moments

        with running(), reported():
            write_moments(str(model), self.sampling, folder, target, progress, self.device, has_stored_names)


def moments_folder(out: Path) -> Path:
    """The folder that has all that is measured for a GGUF file, until the file is complete."""
    return out.with_name(f"{out.name}.moments")


def options_within(run: CalibrationRun | None, model: Path, source: Source, options: Options, requantize: bool, out: Path | None,
                   ) -> Options:
    """The options, with types for the bits that a run has."""
    if run is None or run.bits is None:
        return options
    if out is None:
        fail("give --out with --target-bits: what is measured is kept beside it", 2)
    return run.within_bits(run.bits, model, source, options, requantize, out)


@contextmanager
def moments_of(run: CalibrationRun | None, model: Path, plan: Plan, out: Path) -> Iterator[Calibration | None]:
    """The moments for a GGUF file, which are removed when the file is complete; None without a run."""
    if run is None:
        yield None
        return
    moments = run.for_gguf(model, plan, out)
    yield moments
    shutil.rmtree(moments_folder(out))
