"""Entry points of plug-ins.  Engines call them in all their processes, so they are light and raise nothing."""

from __future__ import annotations

import logging
from importlib import import_module


def install(module: str, engine: str) -> None:
    """Call `install` of a plug-in's module; warn where the engine lacks something that it needs."""
    try:
        import_module(module).install()
    except Exception as error:
        logging.getLogger("qdsl").warning("qdsl is not available in this %s: %s: %s", engine, type(error).__name__, error)
