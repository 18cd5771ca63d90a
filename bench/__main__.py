"""`python -m bench`: measure on the CPU, print one table, and say which goals are met.  `python -m bench.gpu` is the GPU's."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from bench import (
    command_line,
    convert,
    dequantize,
    dispatch,
    effort,
    execute,
    families,
    ggml,
    launch,
    linear,
    loading,
    lossless,
    pack,
    pretrained,
    quantize,
    report,
    rounded,
    sharding,
    uncompiled,
)
from bench.figure import Figure
from bench.timing import WrongResult

GROUPS = {"command_line": command_line, "effort": effort, "dequantize": dequantize, "pack": pack, "convert": convert,
          "quantize": quantize, "lossless": lossless, "families": families, "linear": linear, "rounded": rounded,
          "uncompiled": uncompiled, "ggml": ggml, "launch": launch, "dispatch": dispatch, "execute": execute,
          "sharding": sharding, "loading": loading, "pretrained": pretrained}
ROUNDS, QUICK = 15, 3


def main() -> int:
    """0 also where goals are not met, because machines are noisy; 1 where a result is wrong."""
    options = _options()
    load = os.getloadavg()[0]
    figures: list[Figure] = []
    for name in options.only or GROUPS:
        try:
            for figure in GROUPS[name].figures(QUICK if options.quick else ROUNDS):
                print(f"{name}: {figure.what}", file=sys.stderr)
                figures.append(figure)
        except WrongResult as error:
            print(f"{name}: wrong: {error}", file=sys.stderr)
            return 1
    if not figures:
        return 0
    print(report.table(figures), "", report.summary(figures), report.noise(load), sep="\n")
    if options.json:
        command = shlex.join(["python", "-m", "bench", *sys.argv[1:]])
        options.json.write_text(report.results(command, figures, load), encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure what the project promises.")
    parser.add_argument("--only", action="append", choices=list(GROUPS), metavar="NAME",
                        help=f"measure this group, may be repeated: {', '.join(GROUPS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file too")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} rounds instead of {ROUNDS}, a look")
    options = parser.parse_args()
    if options.json and not options.json.parent.is_dir():
        parser.error(f"no folder {options.json.parent}")
    return options


if __name__ == "__main__":
    sys.exit(main())
