"""The formats that ship with qdsl, one module each, and those of the folder of specs that QDSL_SPECS names.

In a checkout the first lie in generated/ beside the package, where readers look for them; a wheel has them here.
"""

from pathlib import Path

from qdsl import _further_modules

_checkout = Path(__file__).resolve().parents[2] / "generated"
__path__ += [str(folder) for folder in (_checkout, *_further_modules()) if folder.is_dir()]
