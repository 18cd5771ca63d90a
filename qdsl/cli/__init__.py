"""The command line, `qdsl`.  Modules register their commands as they are imported, in the order of the help."""

# ruff: noqa: I001
from qdsl.cli.app import app as app, main as main
from qdsl.cli import formats as formats, infer as infer, analyze as analyze
from qdsl.cli import checkpoints as checkpoints, dequantize as dequantize
from qdsl.cli import quantize as quantize, imatrix as imatrix, convert as convert, compress as compress
from qdsl.cli import example as example, demo as demo, capacity as capacity
from qdsl.cli import generate as generate, models as models, serve as serve
