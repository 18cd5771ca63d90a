#!/usr/bin/env bash
# Fifteen minutes on a GPU: bench/gpu/measure.sh FOLDER [options of python -m bench.gpu.measure]
# Run it again with the same folder to resume.  PYTHON names the interpreter.  FOLDER/triton is Triton's cache: a folder that
# `bench/gpu/measure.sh FOLDER --compile h200` filled on another machine, with the same Triton, saves two minutes here.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?usage: bench/gpu/measure.sh FOLDER}
shift
mkdir -p "$out"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$out/triton}" PYTHONPATH="$PWD" HF_HUB_OFFLINE=1
"${PYTHON:-python}" -m bench.gpu.measure --out "$out" "$@" 2>&1 | tee -a "$out/log.txt"
