"""Kernels of entropy codes, compiled for GPUs that are not there: that they compile, and instructions per weight on sm_90."""

from __future__ import annotations

import json

import pytest

from tests.support import compiling
from tests.support.covering import ALL

# At most so many instructions of a thread per weight in the loop; df11's decode is two launches, exponents and then weights.
LIMITS = {("df11", "decode"): 110, ("df11", "decode, three levels"): 140, ("hlane", "decode"): 14, ("hlane", "1 rows"): 17.5,
          ("fix4", "decode"): 5, ("fix4", "1 rows"): 6.5, ("fix3", "decode"): 7, ("fix3", "1 rows"): 7.5,
          # No figure of these is promised; a change that makes them worse should be seen.
          ("hlane", "16 rows"): 15.5, ("fix4", "16 rows"): 4.5, ("hlane", "symbols"): 14, ("fix4", "symbols"): 9,
          ("fix3", "16 rows"): 6, ("fix3", "symbols"): 13}
SLOW = ("SHFL", "STS", "LDS", "LDSM", "I2F", "BAR")              # moves between lanes, and conversions of integers


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", *(["sm_80", "sm_100"] if ALL else [])])
def test_kernels_of_streams(arch: str) -> None:
    done = compiling.run("tests.kernels.stream_kernels", arch)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["form"], row["what"]) for row in rows} == set(LIMITS)
    if not arch.startswith("sm_"):
        return
    wrong: list[str] = []
    totals: dict[tuple[str, str], float] = {}
    for row in rows:
        key = row["form"], row["what"]
        totals[key] = totals.get(key, 0.0) + row["count"]
        if row["spills"]:
            wrong.append(f"{key}: {row['spills']} spills")
        slow = {op for op in row["opcodes"] if op.split(".")[0] in SLOW}
        if slow and row["form"] != "df11":
            wrong.append(f"{key}: {sorted(slow)} in the loop")
        if "rows" in row["what"] and not any(op.startswith("HMMA") for op in row["tensor"]):
            wrong.append(f"{key}: no HMMA among {row['tensor']}")
    after = totals["df11", "decode"] - next(row["count"] for row in rows if row["what"] == "decode")
    totals["df11", "decode, three levels"] += after              # its second launch is the same
    if arch == "sm_90":
        wrong += [f"{key}: {count:.2f} instructions per weight, at most {LIMITS[key]}" for key, count in totals.items()
                  if count > LIMITS[key]]
    assert wrong == []
