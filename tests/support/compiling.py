"""Modules run in processes in which Triton compiles, which in tests without a GPU it does not.

`run("tests.kernels.gate_kernels", "sm_90")` is `python -m tests.kernels.gate_kernels sm_90`.  Torch, Triton and the tables of all
formats take 5 s of CPU to import, so one process per worker imports them, and forks one for each run.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

# What most runs import when they launch a kernel: torch's operations on meta tensors need the first two.
SHARED = ("torch._dynamo", "torch.fx.experimental.symbolic_shapes", "triton.compiler", "bench.gpu.regimes",
          "qdsl.analyze.execute", "tests.support.covering")


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m module arguments` in the root of the repository: its return code and what it printed."""
    import torch

    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    if torch.cuda.is_available() or not hasattr(os, "fork"):     # CUDA does not survive a fork
        return subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True,
                              env=environment)
    with tempfile.TemporaryDirectory() as folder:
        request = {"module": module, "arguments": arguments, "environment": environment, "folder": folder}
        server = _server()
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        printed, errors = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess([module, *arguments], code, printed, errors)


@cache
def _server() -> subprocess.Popen[str]:
    """The process that forks: it ends with this one."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    server = subprocess.Popen([sys.executable, "-m", "tests.support.compiling"], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})
    atexit.register(server.communicate)
    return server


def main() -> None:
    """Answers each line of stdin, a request, with the return code of its process; returns at the end of stdin, or in a fork."""
    from tests.support.formats import cases

    for name in SHARED:
        importlib.import_module(name)
    cases()
    for line in sys.stdin:
        request = json.loads(line)
        with contextlib.suppress(Exception):                     # the process itself imports it again, and shows the error
            importlib.import_module(request["module"])
        process = os.fork()
        if not process:
            return become(**request)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def become(module: str, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Runs a module as `python -m` does; this process then ends as that would."""
    for number, path in enumerate((os.devnull, Path(folder, "stdout"), Path(folder, "stderr"))):
        os.dup2(os.open(path, os.O_CREAT | os.O_RDWR), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
