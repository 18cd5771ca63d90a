"""Reports of a quantized folder as text: one row for layers that differ only in number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from qdsl.checkpoint.report.contents import escaped

HEADS = ["layers", "count", "shape", "from", "MiB", "SNR dB", "relative RMS"]
NAMES = 3                                                        # that a line lists


def relative_rms(decibels: float | None) -> float:
    """The RMS of errors relative to that of weights.  decibels: signal to noise, None without noise."""
    return 0.0 if decibels is None else 10 ** (-decibels / 20)


def table(report: Mapping[str, Any]) -> list[list[str]]:
    """The cells under HEADS for a report of `run.quantize`; the last row sums all layers."""
    alike: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in report["quantized"]:
        shape = " x ".join(map(str, row["shape"]))
        alike.setdefault((escaped(re.sub(r"\d+", "*", row["name"])), shape, row["from"]), []).append(row)
    rows = [_cells(*head, group, [row["snr_db"] for row in group]) for head, group in alike.items()]
    return [*rows, _cells("all", "", "", report["quantized"], [report["snr_db"]])] if len(rows) > 1 else rows


def _cells(name: str, shape: str, format: str, group: Sequence[Mapping[str, Any]], decibels: Sequence[float | None]) -> list[str]:
    noisy = sorted(ratio for ratio in decibels if ratio is not None)
    ratios = " to ".join(dict.fromkeys(f"{ratio:.1f}" for ratio in (noisy[0], noisy[-1]))) if noisy else "exact"
    return [name, str(len(group)), shape, format, f"{sum(row['nbytes'] for row in group) / (1 << 20):.2f}", ratios,
            f"{relative_rms(noisy[0] if noisy else None):.2%}"]


def unchanged_lines(report: Mapping[str, Any]) -> list[str]:
    """A line for each reason why layers are unchanged."""
    what = "plain" if "quantized" in report else "left as it was"
    by_reason: dict[str, list[str]] = {}
    for name, why in report["left"].items():
        by_reason.setdefault(why, []).append(name)
    return [f"{what}: {', '.join(escaped(repr(name)) for name in names[:NAMES])}"
            f"{f' and {len(names) - NAMES} more' if len(names) > NAMES else ''}: {why}" for why, names in by_reason.items()]
