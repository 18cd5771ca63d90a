"""Files that tests make."""

from __future__ import annotations

from pathlib import Path


def stored(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def unreserved() -> bool:
    """Whether this machine gives out more memory than it has."""
    policy = Path("/proc/sys/vm/overcommit_memory")
    return policy.exists() and policy.read_text().strip() != "2"
