"""Triton as generated modules import it."""

from qdsl.runtime.libraries.triton import tl as tl
from qdsl.runtime.libraries.triton import triton as triton
