"""The fake worker, which sends junk too once it is loaded; the file `$FUZZ_COUNT` says how much so far."""

from __future__ import annotations

import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BATCH = 200

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.chaos.frames import is_order, junk, junk_for

    fake: dict[str, Any] = runpy.run_path(str(ROOT / "tests" / "support" / "misbehaving_worker.py"))
    worker_class = fake["FakeWorker"]
    dice = random.Random(int(os.environ.get("FUZZ_SEED", "0")))
    plain_step = worker_class.step
    sent = 0

    def step(worker: Any) -> None:
        """Junk, then the work."""
        global sent
        if worker.name:
            for _ in range(BATCH):
                worker.socket.send_multipart(junk(dice))
            sent += BATCH
            for request_id, live in list(worker.live.items()):
                if "VICTIM" in live.prompt and not is_order(frame := junk_for(dice, request_id)):
                    worker.socket.send_multipart(frame)
            Path(os.environ["FUZZ_COUNT"]).write_text(str(sent))
        plain_step(worker)

    worker_class.step = step
    fake["main"]()
