"""The options of `quantize` that run a model on a text first."""

from __future__ import annotations

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
    from qdsl.jobs.gguf.plan_file import Plan
    from qdsl.jobs.gguf.run import Calibration

HEADING = "Calibration, with --calibrate"                        # of options in the help


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """A run of a model on a text before it is quantized.  device: that runs it."""

    sampling: Sampling
    device: str | None

    @classmethod
    def of(cls, context: typer.Context, text: Path | None, samples: int, length: int, method: str | None, sequential: bool,
           device: str | None) -> CalibrationRun | None:
        """The run that options ask for; None without a text.  Exits with code 2 for options that do not fit."""
        if text is None:
            refuse_options(context, HEADING, "--calibrate")
            return None
        needs("running a language model", "models", "transformers")
        from qdsl.encode.calibrated.solve import METHODS
        from qdsl.jobs.calibrate import Sampling

        if method is not None and method not in METHODS:
            fail(f"--method is {' or '.join(METHODS)}, not {method}", 2)
        if not text.is_file():
            fail(f"{text}: no such file of text", 2)
        return cls(Sampling(text, method or METHODS[0], samples, length, sequential), device)

    def for_folder(self, model: Path, aim: Conversion) -> tuple[Conversion, Callable[[Path], None]]:
        """The aim with what the numbers depend on, and the function that writes moments into a folder."""
        from dataclasses import replace

        from qdsl.checkpoint.detect.ignored import is_skipped
        from qdsl.jobs.convert.target import target_format

        format = target_format(aim)
        options = {**aim.options, "storage": aim.storage}

        def target(name: str) -> Any:
            return None if is_skipped(name, aim.ignore or ()) else (format, options)

        with reported():
            return replace(aim, calibration=self.sampling.data()), partial(self._write, model, target, has_stored_names=True)

    def for_gguf(self, model: Path, plan: Plan, out: Path) -> Calibration:
        """The moments of a model's layers, written next to the GGUF file, and what they depend on."""
        from qdsl.encode.calibrated.store import Moments
        from qdsl.host.files import digest, identity
        from qdsl.jobs.calibrate import tensor_layers
        from qdsl.jobs.gguf.run import Calibration, quantizer_of

        folder = out.with_name(f"{out.name}.moments")
        files = [model] if model.is_file() else sorted(model.glob("*.safetensors"))
        with reported():
            what = digest(self.sampling.data(), [identity(path) for path in files], [step.type for step in plan.steps])
        tensors = tensor_layers(model, [step.tensor for step in plan.steps if not step.copied])
        types = {name: step.type for step in plan.steps for name in tensors.get(step.tensor.name, ())}

        def target(name: str) -> Any:
            module = quantizer_of(types[name]) if name in types else None
            return None if module is None else (module.FORMAT, {})

        place = folder / what[:16]
        self._write(model, target, place)
        measured = Moments(place)
        layers = {tensor: [name if name in measured else "" for name in names] for tensor, names in tensors.items()
                  if any(name in measured for name in names)}
        return Calibration(place, layers, what, self.sampling.method)

    def _write(self, model: Path, target: Callable[[str], Any], folder: Path, has_stored_names: bool = False) -> None:
        from qdsl.cli.models import running
        from qdsl.cli.progress import progress
        from qdsl.jobs.calibrate import write_moments

        with running(), reported():
            write_moments(str(model), self.sampling, folder, target, progress, self.device, has_stored_names)


@contextmanager
def moments_of(run: CalibrationRun | None, model: Path, plan: Plan, out: Path) -> Iterator[Calibration | None]:
    """The moments for a GGUF file, which are removed when the file is complete; None without a run."""
    if run is None:
        yield None
        return
    moments = run.for_gguf(model, plan, out)
    yield moments
    moments.remove()
