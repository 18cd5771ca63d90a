"""Compiles kernels ahead in processes without a GPU, into the disk cache that Triton's launcher reads first.

A process makes the same launches with tensors that have no data, and passes them to Triton's own launcher, which compiles what it
would run.  So the specialisation, and with it the cache entry, is the same by construction.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

from bench.gpu.device import DeviceInfo, launches_for
from qdsl.runtime.gpu.devices import ARCHS, RESERVED
from qdsl.runtime.libraries.call import Call


class Job(Protocol):
    """What another process can be sent: hashable, picklable, and known by its launches."""

    def calls(self) -> Iterator[Call]: ...


@dataclass(frozen=True)
class CompileResult:
    """How many launches were compiled, in how many seconds, and what went wrong."""

    launches: int
    seconds: float
    error: str = ""


class AbsentDriver:
    """In place of Triton's driver: a GPU that is never used.  arch: compute capability times 10, or AMD's name of one."""

    def __init__(self, arch: int | str, warp: int = 32) -> None:
        self.arch, self.warp = arch, warp

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda" if isinstance(self.arch, int) else "hip", self.arch, self.warp)


class CarriedDriver(AbsentDriver):
    """In place of Triton's driver where kernels are loaded and launched: it keeps their binaries by name, and runs none."""

    def __init__(self, arch: int) -> None:
        super().__init__(arch)
        self.utils, self.binaries, self.launches = self, dict[str, bytes](), 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": ARCHS[f"sm_{self.arch}"].shared - RESERVED}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills and most threads."""
        self.binaries[name] = kernel
        return 0, 0, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return self.launch

    def launch(self, *arguments: Any) -> None:
        self.launches += 1


_info: DeviceInfo | None = None


def start(info: DeviceInfo) -> None:
    """In a process that only compiles."""
    import torch
    import triton

    global _info
    _info = info
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(AbsentDriver(info.capability))


def compile_job(job: Job) -> CompileResult:
    """Compile all launches of a job; one that fails does not keep the others from it."""
    assert _info is not None
    begun, launches, errors = time.monotonic(), 0, []
    try:
        with launches_for(_info):
            for call in job.calls():
                launches += 1
                try:
                    call.kernel.warmup(*call.arguments, grid=call.grid, **call.constants, **call.options)
                except Exception as error:
                    errors.append(f"{call.kernel.__name__}: {type(error).__name__}: {str(error).strip()[:300]}")
    except Exception as error:                                   # of the launches themselves
        errors.append(f"{type(error).__name__}: {error}")
    return CompileResult(launches, time.monotonic() - begun, "; ".join(errors))


def relocate(cache: Path) -> None:
    """Make Triton find a cache that was filled in another folder: it keeps files by their paths, and compiles what is absent."""
    for group in cache.glob("*/__grp__*"):
        names = json.loads(group.read_text())["child_paths"]
        group.write_text(json.dumps({"child_paths": {name: str(group.parent / name) for name in names}}))


def carried(info: DeviceInfo, run: Callable[[], object], calls: Iterable[Call], folder: Path) -> CarriedDriver:
    """The driver of launches that find their kernels in a folder that was Triton's cache elsewhere; nothing is compiled.

    run: makes the launches, with tensors that have data.  calls: the launches whose kernels this process has in memory.
    """
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    for call in calls:
        call.kernel.device_caches.clear()
    driver = CarriedDriver(info.capability)
    triton.runtime.driver.set_active(driver)
    with launches_for(info), patch.dict(os.environ, {"TRITON_CACHE_DIR": str(folder)}), \
            patch.object(CUDABackend, "add_stages", side_effect=RuntimeError("the kernel is not in the cache")):
        run()
    return driver


class Ahead:
    """Processes that compile; without any, each kernel is compiled when it is launched."""

    def __init__(self, info: DeviceInfo, processes: int) -> None:
        self._futures: dict[Job, Future[CompileResult]] = {}
        self._pool: ProcessPoolExecutor | None = None
        if processes:
            # Spawned, for a forked process would inherit the GPU's context; without a GPU in sight, lest one is made.
            before = os.environ.get("CUDA_VISIBLE_DEVICES")
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            try:
                self._pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), start, (info,))
                self.submit(map(_Nothing, range(processes)))
            finally:
                if before is None:
                    del os.environ["CUDA_VISIBLE_DEVICES"]
                else:
                    os.environ["CUDA_VISIBLE_DEVICES"] = before

    def submit(self, jobs: Iterable[Job]) -> None:
        """Compile these, in order, when a process is free."""
        for job in jobs:
            if self._pool is not None and job not in self._futures:
                self._futures[job] = self._pool.submit(compile_job, job)

    def wait(self, job: Job, seconds: float) -> CompileResult | None:
        """When it is compiled, or None where it is not after so many seconds, or never will be ahead."""
        future = self._futures.get(job)
        if future is None:
            return None
        try:
            return future.result(timeout=max(0.0, seconds))
        except (TimeoutError, CancelledError, BrokenProcessPool):
            return None

    def drop(self, jobs: Iterable[Job]) -> None:
        """Those that have not begun are no longer wanted."""
        for job in jobs:
            if job in self._futures:
                self._futures[job].cancel()

    def close(self) -> None:
        """Ends what runs, too."""
        if self._pool is not None:
            running = list((self._pool._processes or {}).values())
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.terminate()


@dataclass(frozen=True)
class _Nothing:
    """A job that makes the pool start a process now: it starts one for each job that finds none idle."""

    place: int

    def calls(self) -> Iterator[Call]:
        yield from ()
