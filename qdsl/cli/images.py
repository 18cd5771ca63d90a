"""The part of `generate` that runs pipelines of diffusers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from qdsl.cli.app import fail, json_text, needs, reported
from qdsl.cli.models import check_options, finite, running
from qdsl.host.files import check_output, regular_file


def draw(model: str, models: Mapping[str, str], out: Path | None, options: dict[str, Any], against: str | None,
         quantization: Mapping[str, Any], place: Mapping[str, Any], force: bool, as_json: bool) -> None:
    """Draw an image twice with one seed, write it, and print the figures.

    models: references of models of the pipeline, by their names.  options: those of `generate_image`.  against: a pipeline that
    draws the same, to compare with.  quantization: a format, its params, and `match_dense`.  place: a device and a dtype.
    """
    target = _target(out, [model, *models.values(), *([] if against is None else [against])], force)
    options = {**options, "size": _size(options["size"])}
    needs("running a pipeline of diffusers", "models,diffusers", "transformers", "diffusers")
    with running():
        name = quantization["format"]
        check_options(place["device"], *([(name, quantization["params"])] if name else []))
        from qdsl.host.files import replacing
        from qdsl.host.system import resident_bytes
        from qdsl.models.diffusers import images
        from qdsl.models.diffusers.pipeline import pipeline_folder

        if against is not None:
            pipeline_folder(against)                             # a wrong name is an error before anything is drawn
        loaded = images.load_image_pipeline(model, models, **quantization, **place, is_quiet=as_json)
        image, again = (images.generate_image(loaded, **options) for _ in range(2))
        report: dict[str, Any] = {
            "model": loaded.name, "out": str(target), "size": image.image.size, "load_seconds": loaded.seconds,
            "resident": resident_bytes(), "device_peak": images.peak_device_bytes(), "steps": image.steps,
            "seconds": [image.seconds, again.seconds], "again": images.image_difference(again, image).data()}
        with replacing(target) as file:
            image.image.save(file, "PNG")
        if against is not None:
            del loaded                                           # its memory is free before the other is loaded
            base = images.load_image_pipeline(against, **place, is_quiet=as_json)
            difference = images.image_difference(image, images.generate_image(base, **options))
            report |= {"against": {"model": against, **difference.data()}}
    if as_json:
        typer.echo(json_text(finite(report)))
        return
    width, height = report["size"]
    first, second = report["seconds"]
    typer.echo(f"written  {target}: {width} x {height} pixels, {report['steps']} steps in {first:.1f} s; "
               f"again in {second:.1f} s: {_text(report['again'])}")
    if against is not None:
        typer.echo(f"against {against}: {_text(report['against'])}")
    on_device = f", {report['device_peak'] / 1e6:.0f} MB of GPU memory" if report["device_peak"] else ""
    typer.echo(f"loaded in {report['load_seconds']:.1f} s, {report['resident'] / 1e6:.0f} MB resident{on_device}", err=True)


def _target(out: Path | None, inputs: Iterable[str], force: bool) -> Path:
    """The file to write.  Exits with code 2 without one, or for one that is no .png file, an input, or an existing file."""
    if out is None or out.suffix.lower() != ".png":
        fail("give --out with the .png file to write", 2)
    with reported():
        regular_file(out)
        check_output(out, *(ref for ref in inputs if Path(ref).exists()), force=force)
    return out


def _size(text: str | None) -> tuple[int, int] | None:
    """Width and height of '1024x768'; None for none.  Exits with code 2 for other text."""
    if text is None:
        return None
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        fail(f"--size is WIDTHxHEIGHT, such as 1024x1024, not '{text}'", 2)
    return int(width), int(height)


def _text(difference: Mapping[str, Any]) -> str:
    latents = ""
    if difference["latents"] is not None:
        latents = f", latents differ by {difference['latents']:.3g} at most, {difference['relative']:.3g} relative"
    return "identical" if difference["identical"] else f"signal to noise {difference['psnr']:.2f} dB{latents}"
