"""The misbehaving worker, with its mode taken from a plan: the file `$CHAOS_PLANS/<model>`, used up by one start.

So any fault can be had at the next start of a worker, and the start after that is a healthy one.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

FAKE = Path(__file__).parents[1] / "support" / "misbehaving_worker.py"


def take_plan(plans: Path, model: str) -> str:
    """The mode planned for the next worker of a model; empty: behave."""
    plan = plans / model
    try:
        mode = plan.read_text(encoding="utf-8")
        plan.unlink()
    except FileNotFoundError:
        return ""
    return mode


if __name__ == "__main__":
    name = next(word.removeprefix("--name=") for word in sys.argv if word.startswith("--name="))
    os.environ["BULKHEAD_MISBEHAVE"] = take_plan(Path(os.environ["CHAOS_PLANS"]), name)
    runpy.run_path(str(FAKE), run_name="__main__")
