"""An application that embeds an orchestrator over planned workers: `python -m tests.chaos.embedded_host DIR CONFIG`.

`bulkhead serve` cannot be told another worker command, so the faults that need one run here, with a front door too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from mlx_bulkhead.orchestrator.config import load_config
from mlx_bulkhead.orchestrator.embedded import Orchestrator

WORKER = Path(__file__).with_name(os.environ.get("CHAOS_WORKER", "planned_worker.py"))


async def main(run_dir: Path, config: Path) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    command = (sys.executable, "-P", str(WORKER))
    async with Orchestrator(load_config(config), run_dir=run_dir, front_door=True, worker_command=command) as host:
        loop.add_signal_handler(signal.SIGTERM, host.request_shutdown)
        print("bulkhead ready", file=sys.stderr, flush=True)
        await host.wait_shutdown()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
