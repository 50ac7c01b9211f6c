"""`python -m benchmarks`: measures, prints the table, and writes it into the page when asked to."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import report
from .bench import open_bench
from .figures import FIGURES, default_figures
from .machine import Bystanders, describe
from .measure import Figure


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, help="rounds of each figure (default 7, quick 2)")
    parser.add_argument("--quick", action="store_true", help="short runs: to try it out, not to quote")
    parser.add_argument("--only", action="append", choices=list(FIGURES), help="only this figure; repeatable")
    parser.add_argument("--draft", type=Path, metavar="DIR", help="a DFlash draft for SmolLM2-135M, for real-pair")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="also put the table into this page")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 7)
    found: list[Figure] = []
    with open_bench(rounds, quick=options.quick, draft=options.draft) as bench:
        bystanders = Bystanders()
        for name in options.only or default_figures(options.draft):
            print(f"{name} …", file=sys.stderr, flush=True)
            found += FIGURES[name](bench)
        others = f"{rounds} rounds; other processes took {bystanders.cores():.2f} cores meanwhile"
        about = [*describe(bench.library.pid), others]
    text = report.block(found, about)
    print(text)
    if options.write is not None:
        report.write(options.write, text)
    if foreign := [name for name in ("mlx", "mlx_lm", "numpy") if name in sys.modules]:
        raise SystemExit(f"the measuring process has imported {', '.join(foreign)}: it shall not")


if __name__ == "__main__":
    main()
