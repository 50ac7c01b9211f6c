"""Load, one request, unload, again and again: whether all memory comes back."""

from __future__ import annotations

import psutil

from ..bench import Bench
from ..daemon import Daemon
from ..measure import Figure, at_most
from ..work import text_prompt

ROUNDS, QUICK_ROUNDS = 100, 10
NAME = "again"
TOKENS = 16
GOAL = 1.02


def reload(bench: Bench) -> list[Figure]:
    rounds = QUICK_ROUNDS if bench.quick else ROUNDS
    model = bench.folder / "model"
    daemon = Daemon(bench.folder / "reload")
    trees: list[int] = []
    workers: list[int] = []
    gone: list[int] = []
    try:
        for _ in range(rounds):
            daemon.client.load(NAME, model)
            daemon.client.complete(NAME, prompt=text_prompt(bench.seed()), max_tokens=TOKENS)
            pid = next(one.pid for one in daemon.client.models() if one.name == NAME)
            assert pid is not None
            workers.append(psutil.Process(pid).memory_info().rss)
            daemon.client.unload(NAME)
            trees.append(_tree(daemon.pid))
            gone.append(psutil.virtual_memory().total - psutil.virtual_memory().available)
    finally:
        daemon.close()
    what = f"{rounds} loads and unloads: memory of the daemon's tree after one, over the first, largest"
    lost = (max(gone) - gone[0]) / 2**20
    return [
        at_most(
            what,
            [max(trees) / trees[0]],
            GOAL,
            "",
            digits=3,
            beside=f"{trees[0] / 2**20:.1f} MiB at first, {trees[-1] / 2**20:.1f} at last; "
            f"the whole host had {lost:.0f} MiB less at most, its other processes included",
        ),
        at_most(
            "the same: memory of a worker with the model, over that of the first, largest",
            [max(workers) / workers[0]],
            GOAL,
            "",
            digits=3,
            beside=f"{workers[0] / 2**20:.1f} MiB at first, {workers[-1] / 2**20:.1f} at last",
        ),
    ]


def _tree(pid: int) -> int:
    """Resident bytes of a process and all that descend from it; a worker that was not reaped would be among them."""
    daemon = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (daemon, *daemon.children(recursive=True)))
