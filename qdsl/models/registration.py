"""Entry points of plug-ins, which engines call in all of their processes, for every model: light, and they raise nothing."""

from __future__ import annotations

import logging
from importlib import import_module


def install(module: str, engine: str) -> None:
    """Call `install` of a plug-in's module; with a warning, an engine that lacks what it takes is left alone."""
    try:
        import_module(module).install()
    except Exception as error:
        logging.getLogger("qdsl").warning("qdsl is not available in this %s: %s: %s", engine, type(error).__name__, error)
