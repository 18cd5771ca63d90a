"""Examines kernels without a GPU: compiles them for any architecture, disassembles them and counts instructions.

Counts (registers, instructions, loads) are exact for the installed compiler; all rates and shares of bandwidth are predicted.
"""

from qdsl.analyze.counts import Report, report
from qdsl.analyze.gpus import ARCHS, GPUS, AnalyzeError
from qdsl.analyze.predict import Prediction, predict
from qdsl.runtime.gpu.costs import Candidate, seconds

__all__ = ["ARCHS", "GPUS", "AnalyzeError", "Candidate", "Prediction", "Report", "predict", "report", "seconds"]
