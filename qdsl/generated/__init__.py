"""The formats that ship with qdsl, one module each.

In a checkout they lie in generated/ beside the package, where readers look for them; a wheel has them here.
"""

from pathlib import Path

_checkout = Path(__file__).resolve().parents[2] / "generated"
if _checkout.is_dir():
    __path__.append(str(_checkout))
