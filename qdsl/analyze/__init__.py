"""Kernels examined without a GPU: compiled for one that need not be there, disassembled, counted.

What is counted (registers, instructions, loads) is exact for the compiler that is installed; every rate and share of
bandwidth is predicted.
"""

from qdsl.analyze.counts import Report, report
from qdsl.analyze.gpus import ARCHS, GPUS, AnalyzeError
from qdsl.analyze.predict import Prediction, predict
from qdsl.runtime.gpu.costs import Candidate, seconds

__all__ = ["ARCHS", "GPUS", "AnalyzeError", "Candidate", "Prediction", "Report", "predict", "report", "seconds"]
