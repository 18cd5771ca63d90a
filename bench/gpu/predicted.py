"""Predictions for a GPU that is not present, for the formats and shapes that are timed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from bench import report as bench_report
from bench.gpu import times
from bench.gpu.device import H200, launches_for, product
from bench.gpu.plan import product_calls
from bench.gpu.report import SCHEMA, say
from bench.gpu.weights import DTYPES
from qdsl.analyze import GPUS, predict, report

NAME = "predicted-h200.json"
SHAPE = (8192, 8192)                                             # N x K
ROWS = (1, 8, 64)                                                # with more, most of the time is another package's matmul


def results(command: str) -> dict[str, Any]:
    """The file's data."""
    return {"schema": SCHEMA, "kind": "predicted", "command": command, "date": datetime.now(UTC).date().isoformat(),
            "device": {"gpu": GPUS["h200"].title, "bandwidth_gbps": GPUS["h200"].bandwidth},
            "versions": {name: version for name, version in bench_report.versions().items() if name in ("qdsl", "triton")},
            "times": list(rows())}


def rows(sides: list[times.Side] | None = None, counts: tuple[int, ...] = ROWS) -> Iterator[dict[str, Any]]:
    """A row for each side and number of rows that one fused kernel serves."""
    name = product(H200.name)
    assert name is not None
    gpu = GPUS[name]
    for side in times.sides(SHAPE) if sides is None else sides:
        for count in counts:
            if not times.is_timed(side, count):
                continue
            with launches_for(H200):
                calls = list(product_calls(side.weight.meta(), count, DTYPES[side.x]))
            if any(call.family == "dequantize" for call in calls):
                continue
            predictions = [predict(report(call, gpu.arch), gpu) for call in calls]
            seconds = sum(prediction.seconds or 0.0 for prediction in predictions)
            say(f"predicted: {side.name} ({side.x}), M = {count}: {seconds * 1e6:.1f} us")
            yield {"n": side.weight.shape[0], "k": side.weight.shape[1], "rows": count, "what": side.name, "x": side.x,
                   "us": float(f"{seconds * 1e6:.4g}"), "of_bandwidth": float(f"{predictions[0].share:.3g}"),
                   "limit": predictions[0].limit}
