"""Looks at a daemon's memory budget while something else goes on."""

from __future__ import annotations

import threading

from mlx_bulkhead import Client

from .daemon import Daemon


class CapWatch:
    """Looks ten times a second at the caps of all workers that live, against the budget."""

    def __init__(self, daemon: Daemon) -> None:
        self.most = 0.0
        """The largest sum of caps, or of shares held, over the budget."""
        self.looks = 0
        self.crowded = 0
        """Looks at which two workers or more lived."""
        self._client = Client(daemon.run_dir)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caps")
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._ended.wait(0.1):
            reply = self._client.stats()
            if reply.placement is None:
                raise RuntimeError("the daemon has no budget")
            shares = {place.name: place.share for place in reply.placement.places}
            live = [model for model in reply.models if model.pid is not None]
            # What a worker that still loads has in force is what it was told: its share.
            caps = [m.info.limits.memory_bytes if m.info is not None else shares.get(m.name, 0) for m in live]
            self.most = max(self.most, max(sum(caps), reply.placement.held) / reply.placement.budget)
            self.looks += 1
            self.crowded += len(live) > 1
