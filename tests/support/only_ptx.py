"""Triton without ptxas, for tests that execute PTX: it costs a tenth of compiling, and nothing reads what it makes."""

from __future__ import annotations

from typing import Any

import triton


def stop_at_ptx() -> None:
    """Makes this process compile to PTX alone, in entries of Triton's cache of their own."""
    def stages_of(backend: object = None, stages: dict[str, Any] | None = None, *_: object) -> tuple[str, str] | None:
        if stages is None:
            return "only ptx", "only ptx"
        stages["cubin"] = lambda source, metadata: b""
        return None
    triton.knobs.runtime.add_stages_inspection_hook = stages_of
