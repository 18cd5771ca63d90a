"""Words of messages."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """A number and what it counts: '1 layer', '2 layers'.  noun: in the singular, with a regular plural of its last word."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
