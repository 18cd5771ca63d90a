"""The progress messages and the results file of a run."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.gpu.device import DeviceInfo

SCHEMA = 1
_begun = time.monotonic()


def say(line: str) -> None:
    """Progress, at once."""
    print(f"[{time.monotonic() - _begun:6.1f} s] {line}", file=sys.stderr, flush=True)


def name_of(info: DeviceInfo) -> str:
    """The name of a results file: the device and the versions of what compiles and what is compared with."""
    device = re.sub(r"[^a-z0-9]+", "-", info.name.lower()).strip("-")
    version_of = report.versions()
    short = [re.match(r"\d+\.\d+", version_of[name] or "?") for name in ("torch", "triton")]
    return f"gpu-{device}-torch{short[0][0] if short[0] else ''}-triton{short[1][0] if short[1] else ''}.json"


def head(command: str, info: DeviceInfo, quick: bool) -> dict[str, Any]:
    """With what and on what a run was made."""
    return {"schema": SCHEMA, "kind": "gpu", "command": command, "date": datetime.now(UTC).date().isoformat(), "quick": quick,
            "device": {"gpu": info.name, "capability": info.capability, "multiprocessors": info.multiprocessors,
                       "l2": info.l2, "processors": os.cpu_count()},
            "versions": {**report.versions(), "cuda": torch.version.cuda}}


def written(data: dict[str, Any]) -> str:
    """JSON with a line for each row of a list."""
    return _text(data, 0) + "\n"


def _text(value: Any, level: int) -> str:
    pad, end = "  " * (level + 1), "  " * level
    if isinstance(value, dict) and level < 2 and value:
        rows = ",\n".join(f"{pad}{json.dumps(key)}: {_text(entry, level + 1)}" for key, entry in value.items())
        return f"{{\n{rows}\n{end}}}"
    if isinstance(value, list) and value:
        rows = ",\n".join(f"{pad}{json.dumps(entry, allow_nan=False)}" for entry in value)
        return f"[\n{rows}\n{end}]"
    return json.dumps(value, allow_nan=False)


def keep(path: Path, data: dict[str, Any]) -> None:
    """The file as it stands, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(written(data), encoding="utf-8")
    part.replace(path)
