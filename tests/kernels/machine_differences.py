"""The PTX machine compared with a GPU, for which another machine stands in: `python -m tests.kernels.machine_differences`."""

from __future__ import annotations

import json

from bench.gpu import machine
from bench.gpu.device import H200, launches_for
from qdsl.analyze.execute import execute
from qdsl.runtime.libraries.call import Call


def stand_in(call: Call) -> None:
    """A GPU that gets the first result of `gemv_records` wrong by one."""
    execute(call, "sm_90")
    if call.family == "gemv_records":
        call.arguments[call.kernel.arg_names.index("out")][0, 0] += 1


if __name__ == "__main__":
    machine.CASES = (("q4_0", "planar", 5), ("q4_k", "gguf", 1))
    with launches_for(H200):
        print(json.dumps(machine.table(list(machine.differences("sm_90", "cpu", stand_in)))))
