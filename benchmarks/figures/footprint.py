"""The daemon itself: how soon it is there, how large it is, and that nothing heavy is loaded in it."""

from __future__ import annotations

import subprocess
import sys

from .. import machine
from ..bench import Bench
from ..daemon import Daemon
from ..measure import Figure, at_most, spread

HEAVY = ("mlx", "mlx_lm", "mlx_vlm", "transformers", "tokenizers", "numpy", "torch")

_LIST_IMPORTS = f"""
import sys, mlx_bulkhead.orchestrator.embedded, mlx_bulkhead.orchestrator.cli
print(*[name for name in {HEAVY!r} if name in sys.modules])
"""


def footprint(bench: Bench) -> list[Figure]:
    ready: list[float] = []
    fresh: list[float] = []
    for number in range(bench.rounds):
        daemon = Daemon(bench.folder / f"fresh-{number}")
        ready.append(daemon.ready_s)
        fresh.append(daemon.rss_mb)
        daemon.close()
    found = _heavy(bench.daemon.pid)
    return [
        at_most("daemon, start to first answer", ready, 0.3, "s"),
        at_most(
            "daemon, resident memory after the figures above",
            [bench.daemon.rss_mb],
            45.0,
            "MB",
            digits=1,
            beside=f"fresh {spread(fresh, 1)} MB",
        ),
        at_most(
            "daemon, heavy modules in it",
            [float(len(found))],
            0,
            "",
            digits=0,
            goal_text="none",
            beside=", ".join(found) or f"looked for {', '.join(HEAVY)}",
        ),
    ]


def _heavy(pid: int) -> list[str]:
    """Modules that importing the daemon brings in, and native libraries that the running one has mapped."""
    imported = subprocess.run([sys.executable, "-P", "-c", _LIST_IMPORTS], check=True, capture_output=True, text=True)
    native = {
        path.name for path in machine.mapped(pid) for heavy in HEAVY if path.name.startswith((heavy, f"lib{heavy}"))
    }
    return sorted({*imported.stdout.split(), *native})
