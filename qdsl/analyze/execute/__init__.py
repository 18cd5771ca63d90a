"""Executes the PTX of a compiled kernel on a CPU, thread by thread: its results, and its errors.

Triton's interpreter runs the source; this runs the compiled code: layouts of MMAs, shuffles, shared memory, asynchronous copies,
predicates, conversions, addresses.  It models neither time nor hardware: ptxas may still reorder what PTX leaves open, and
approximate functions are rounded to nearest here.
"""

from qdsl.analyze.execute.machine import Finding, Options
from qdsl.analyze.execute.ptx import ExecutionError
from qdsl.analyze.execute.run_launch import Execution, execute, execute_ptx
from qdsl.runtime.libraries.call import Call

__all__ = ["Call", "Execution", "ExecutionError", "Finding", "Options", "execute", "execute_ptx"]
