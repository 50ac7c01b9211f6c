"""`python -m tests.chaos`: faults at random for a while. Exit code 1 if anything was not as promised."""

from __future__ import annotations

import argparse
import os
import random
import sys

from .report import table, verdict
from .run import Plan, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults go on (%(default)s)")
    parser.add_argument("--faults", type=int, help="how many to attempt; default: two a second")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    faults = options.faults if options.faults is not None else max(20, int(2.0 * options.seconds))
    print(f"seed {options.seed}; {options.seconds:g} s; {faults} faults", flush=True)
    outcome = run(Plan(options.seconds, faults, options.seed, prompts=24 if options.seconds > 90 else 8))
    print(table(outcome))
    print()
    print(verdict(outcome))
    return 1 if outcome.record.violations else 0


if __name__ == "__main__":
    sys.exit(main())
