"""`python -m bench.plots` draws the figures of the documentation, docs/plots/*.svg, from bench/results.

The same results give the same bytes.  Colours follow the reader's light or dark theme.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, OUT = ROOT / "bench" / "results", ROOT / "docs" / "plots"
FORMATS, QUALITY = RESULTS / "formats-minilm.json", RESULTS / "smollm2-quality.json"
PERPLEXITIES, TRAINED = RESULTS / "formats-smollm2.json", RESULTS / "formats-trained.json"
CALIBRATED = RESULTS / "calibrated-trained.json"
CANDIDATES = RESULTS / "gpu-nvidia-h100-80gb-hbm3-torch2.11-triton3.6-candidates.json"
TIMES = RESULTS / "gpu-nvidia-h100-80gb-hbm3-torch2.11-triton3.6.json"
LIGHT, DARK = "--paper:#ffffff;--ink:#1f2328;--grid:#d8dee4", "--paper:#0d1117;--ink:#e6edf3;--grid:#30363d"
STYLE = (f".qdsl-plot{{{LIGHT}}}.qdsl-plot .paper{{fill:var(--paper)}}.qdsl-plot text{{fill:var(--ink);font-size:11px}}"
         f".qdsl-plot .grid{{stroke:var(--grid)}}@media (prefers-color-scheme:dark){{.qdsl-plot{{{DARK}}}}}"
         f"[data-md-color-scheme=default] .qdsl-plot{{{LIGHT}}}[data-md-color-scheme=slate] .qdsl-plot{{{DARK}}}")
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#9c755f", "#edc948")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 480, 56, 44, 24, 70
LETTER, LINE = 6.2, 12                                           # of a label: width of a letter, height


@dataclass(frozen=True)
class Series:
    """Points (x, y, label) of one colour.  joined: with lines between them, and one label at the end of the line."""

    name: str
    points: Sequence[tuple[float, float, str]]
    joined: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """The marks of an axis, between which it spans; in equal steps, or in equal ratios if it is logarithmic."""

    title: str
    marks: Sequence[float]
    is_log: bool = False

    def at(self, value: float) -> float:
        """The place of a value, 0 at the first mark and 1 at the last."""
        scale: Callable[[float], float] = math.log if self.is_log else float
        return (scale(value) - scale(self.marks[0])) / (scale(self.marks[-1]) - scale(self.marks[0]))


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """The text of an SVG file: series in a grid, a legend below.  Labels that would cover another one are left to tooltips."""
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    body = [f'<svg xmlns="http://www.w3.org/2000/svg" class="qdsl-plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'font-family="system-ui,sans-serif">', f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>', _text(LEFT, 20, title, "start", 14),
            _text(LEFT, 36, y.title), _text(LEFT + width, TOP + height + 32, x.title, "end")]
    for mark in x.marks:
        at = LEFT + width * x.at(mark)
        body += [_line(at, TOP, at, TOP + height), _text(at, TOP + height + 15, f"{mark:g}", "middle")]
    for mark in y.marks:
        at = TOP + height * (1 - y.at(mark))
        body += [_line(LEFT, at, LEFT + width, at), _text(LEFT - 6, at + 4, f"{mark:g}", "end")]
    labels = _Labels()
    for line, colour in zip(series, COLOURS, strict=False):
        places = [(LEFT + width * x.at(a), TOP + height * (1 - y.at(b)), label) for a, b, label in line.points]
        if line.joined:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in places)
            dash = ' stroke-dasharray="5 4"' if line.dashed else ""
            body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        body += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{3 if line.joined else 4}" fill="{colour}"><title>{escape(label)}</title>'
                 "</circle>" for a, b, label in places]
        labels.points += [(a, b) for a, b, _ in places]
    if not any(line.joined for line in series):
        body += [placed for line in series for a, b, label in line.points
                 if (placed := labels.place(LEFT + width * x.at(a), TOP + height * (1 - y.at(b)), label.split(":")[0]))]
    return "\n".join([*body, *_legend(series), "</svg>"]) + "\n"


class _Labels:
    """Labels beside their points, none over another one or over a point."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self.boxes: list[tuple[float, float, float, float]] = []

    def place(self, x: float, y: float, label: str) -> str:
        """An element of text at one of the four sides of a point; '' where no side is free."""
        width = LETTER * len(label)
        for dx, dy in ((7, 4), (-7 - width, 4), (-width / 2, -8), (-width / 2, 17), (6, -6), (6, 14)):
            box = (x + dx, y + dy - LINE + 2, x + dx + width, y + dy + 2)
            dots = [(a - 3, b - 2, a + 3, b + 2) for a, b in self.points if (a, b) != (x, y)]
            if box[0] >= LEFT and box[2] <= WIDTH - 2 and not any(_overlap(box, other) for other in (*self.boxes, *dots)):
                self.boxes.append(box)
                return _text(x + dx, y + dy, label)
        return ""


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 0) -> str:
    style = f' style="font-size:{size}px;font-weight:600"' if size else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _legend(series: Sequence[Series]) -> Iterable[str]:
    x, y = float(LEFT), HEIGHT - 22
    for line, colour in zip(series, COLOURS, strict=False):
        if x + 20 + LETTER * len(line.name) > WIDTH:
            x, y = float(LEFT), y + 16
        yield f'<circle cx="{x:.1f}" cy="{y - 4}" r="4" fill="{colour}"/>'
        yield _text(x + 9, y, line.name)
        x += 28 + LETTER * len(line.name)


# -- the figures -----------------------------------------------------------------------------------------------------------

FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (            # the first whose beginnings a format's name has
    ("GGUF and ik_llama.cpp", ("q4_", "q5_", "q8_", "q2_", "q3_", "q6_", "q1_", "iq", "tq", "ik_", "mxfp4", "nvfp4")),
    ("integers in groups or rows", ("int", "awq", "hqq", "quanto", "mlx", "qserve", "fbgemm", "bnb_int8", "nunchaku", "kivi",
                                     "bitnet")),
    ("floats with scales: FP8, MX, NVFP4, FP6", ("fp", "ocp", "nvfp4_")),
    ("tables of levels", ("nf4", "bnb_fp4", "openvino", "squeeze", "flute", "any", "coreml", "aqlm", "vptq", "spqr")),
)


def family(name: str) -> str:
    """The family of a format, by its name."""
    matching = [(len(begin), title) for title, begins in FAMILIES for begin in begins if name.startswith(begin)]
    return max(matching, default=(0, FAMILIES[1][0]))[1]


def by_family(points: Iterable[tuple[float, float, str]]) -> list[Series]:
    """A series for each family that has a point; labels begin with a format's name."""
    every = list(points)
    return [Series(title, chosen) for title, _ in FAMILIES
            if (chosen := [point for point in every if family(point[2].split()[0].split(":")[0]) == title])]


def signal_to_noise() -> str:
    """Signal to noise of real weights over bits, a point for each format and its parameters in its first storage."""
    measured = json.loads(FORMATS.read_text())["formats"]
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for row in measured:
        if row["snr_db"] is not None and row["bits_per_weight"] < 10:
            first.setdefault((row["format"], json.dumps(row["params"])), row)
    points = [(row["bits_per_weight"], row["snr_db"], f"{_label(row)}: {row['bits_per_weight']:.2f} bits, {row['snr_db']:.1f} dB")
              for row in first.values()]
    return chart("Signal to noise of weights", Axis("bits per weight", range(1, 11)),
                 Axis("dB, more is better", range(-10, 51, 10)), by_family(points))


def _label(row: dict[str, Any]) -> str:
    return " ".join([row["format"], *(f"{key}={value}" for key, value in row["params"].items())])


def perplexity() -> str:
    """Perplexity of SmolLM2 over the bits of the whole model."""
    result = json.loads(QUALITY.read_text())
    points = []
    for model in result["models"]:
        name = model["name"].removeprefix(f"{result['against']} as ").removeprefix("SmolLM2-135M-")
        if model["packed"] > 200 and model["bits_per_weight"] < 11:       # most layers
            points.append((model["bits_per_weight"], model["perplexity"], name))
    files = [(x, y, name.removesuffix(".gguf")) for x, y, name in points if name.endswith(".gguf")]
    series = [*by_family(point for point in points if not point[2].endswith(".gguf") and point[1] < 23),
              Series("GGUF files, embedding packed", files)]
    return chart("Perplexity of SmolLM2-135M-Instruct", Axis("bits per weight of the whole model", (5, 6, 7, 8, 9, 10, 11)),
                 Axis("perplexity, less is better; bfloat16 has 13.93", range(13, 24)), series)


def formats() -> str:
    """Perplexity of SmolLM2 with all layers in a format over bits of the layers, a point for each format and its parameters."""
    measured = [row for row in json.loads(PERPLEXITIES.read_text())["formats"] if row["format"] and row["perplexity"]]
    points = [(row["bits_per_weight"], row["perplexity"], f"{_label(row)}: {row['bits_per_weight']:.2f} bits, perplexity "
               f"{row['perplexity']:.2f}, divergence {row['divergence']:.4f}")
              for row in measured if row["bits_per_weight"] < 10 and row["perplexity"] < MOST_PERPLEXITY]
    return chart("SmolLM2-135M-Instruct with all layers in a format, without calibration", Axis("bits per weight of the layers",
                 range(2, 11)), Axis("perplexity, less is better; the model itself has 13.93", (13.5, 15, 17, 20, 25, 30, 40, 50),
                                     is_log=True), by_family(points))


def calibrated() -> str:
    """What a token costs more than in the model itself, over bits: without calibration, GGUF's types by ggml, and with it."""
    rows = [row for row in json.loads(CALIBRATED.read_text())["rows"] if "texts" in row]
    by_ggml = {row["format"] for row in rows if row["method"] == "ggml"}
    series: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows:
        nats = sum(text["nats"] for text in row["texts"]) / len(row["texts"])
        if row["method"] != "rounded" or row["format"] not in by_ggml:
            name = {"calibrated": "calibrated", "ggml": "by ggml with an importance matrix"}.get(row["method"], "rounded")
            label = f"{_label(row)}: {row['bits_per_weight']:.2f} bits, {nats:.5f} nats"
            series.setdefault(name, []).append((row["bits_per_weight"], max(nats, LEAST_NATS), label))
    marks = (LEAST_NATS, 0.0003, 0.001, 0.003, 0.01, 0.03)
    return chart("A Llama of 17 million weights, all layers in a format", Axis("bits per weight of the layers", range(2, 10)),
                 Axis("nats per token more than the model itself, less is better", marks, is_log=True),
                 [Series(name, points) for name, points in sorted(series.items())])


LEAST_NATS = 0.0001                                              # of the figure: less is within the error


def divergence() -> str:
    """Divergence of a small model with all layers in a format over bits of the layers, a point for each format."""
    measured = [row for row in json.loads(TRAINED.read_text())["formats"] if row["format"] and row["perplexity"]]
    points = [(row["bits_per_weight"], max(row["divergence"], LEAST), f"{_label(row)}: {row['bits_per_weight']:.2f} bits, "
               f"divergence {row['divergence']:.6f}, perplexity {row['perplexity']:.2f}")
              for row in measured if row["bits_per_weight"] < 10]
    return chart("A Llama of 4 layers with all layers in a format, without calibration", Axis("bits per weight of the layers",
                 range(1, 11)), Axis("mean KL divergence in nats, less is better", [10.0**power for power in range(-6, 2)],
                                     is_log=True), by_family(points))


LEAST = 1e-6                                                     # divergence that the figure shows
MOST_PERPLEXITY = 50.0                                           # of the figure; a model with more is not usable
SPEEDS = {"int_group.planar bits=4": "int4", "q4_0.planar": "q4_0", "q4_k.planar": "q4_k", "nf4.planar": "nf4",
          "fp8_block.planar": "fp8_block", "q8_0.planar": "q8_0"}
BFLOAT16 = "bfloat16, torch"


def speed() -> str:
    """Microseconds of the fastest kernel over the rows of x."""
    best: dict[str, dict[int, float]] = {}
    for row in json.loads(CANDIDATES.read_text())["candidates"]:
        if row["weight"] in SPEEDS and isinstance(row["us"], float):
            times = best.setdefault(row["weight"], {})
            times[row["rows"]] = min(times.get(row["rows"], math.inf), row["us"])
    dense = sorted((row["rows"], row["us"]) for row in json.loads(TIMES.read_text())["times"]
                   if row["what"] == "torch F.linear" and row["x"] == "bf16")
    lines = {name: sorted(best[weight].items()) for weight, name in SPEEDS.items()} | {BFLOAT16: dense}
    series = [Series(name, [(rows, us, f"{name}, {rows} rows: {us:.1f} us") for rows, us in line], joined=True,
                     dashed=name == BFLOAT16) for name, line in lines.items()]
    return chart("linear, 8192 x 8192, H100", Axis("rows of x", [1 << power for power in range(10)], is_log=True),
                 Axis("microseconds, less is better", (10, 20, 50, 100, 200, 400), is_log=True), series)


FIGURES: dict[str, Callable[[], str]] = {"snr": signal_to_noise, "perplexity": perplexity, "formats": formats,
                                         "divergence": divergence, "calibrated": calibrated, "speed": speed}


def main() -> None:
    OUT.mkdir(exist_ok=True)
    for name, figure in FIGURES.items():
        (OUT / f"{name}.svg").write_text(figure())


if __name__ == "__main__":
    main()
