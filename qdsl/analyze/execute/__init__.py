"""The PTX of a compiled kernel, run on a CPU thread by thread, as a GPU would run it: its results, and what is wrong with it.

Triton's interpreter runs the source; this runs what was compiled: layouts of matrix instructions, shuffles, shared memory,
asynchronous copies, predicates, conversions, addresses.  It is no timing model and no GPU: ptxas may still reorder what PTX
leaves open, and approximate functions are rounded to the nearest here.
"""

from qdsl.analyze.execute.launch import Execution, execute, execute_ptx
from qdsl.analyze.execute.machine import Finding, Options
from qdsl.analyze.execute.program import ExecutionError
from qdsl.runtime.gpu.call import Call

__all__ = ["Call", "Execution", "ExecutionError", "Finding", "Options", "execute", "execute_ptx"]
