"""Three models, room for two, requests at random: loads over those of an ideal LRU, and what the budget promises."""

from __future__ import annotations

import random
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from mlx_bulkhead import BulkheadError, Client

from .. import tiny
from ..bench import Bench
from ..caps import CapWatch
from ..daemon import Daemon
from ..measure import Figure, at_most
from ..work import text_prompt

NAMES = ("one", "two", "three")
ROOM = 2
REQUESTS, QUICK_REQUESTS = 500, 40
IN_FLIGHT = 2
TOKENS = 16
CONFIG = """
[limits]
spare_workers = 1
[memory]
budget = {budget}
min_residency_s = 0
queue_s = 60
"""
MODEL = """
[models.{name}]
model = "{path}"
context_limit = 2048
memory_limit = {share}
"""
SHARE = 256 * 2**20


def placement(bench: Bench) -> list[Figure]:
    config = bench.folder / "placement.toml"
    text = CONFIG.format(budget=ROOM * SHARE + SHARE // 2)
    for name in NAMES:
        text += MODEL.format(name=name, path=tiny.make(bench.folder / name), share=SHARE)
    config.write_text(text)
    daemon = Daemon(bench.folder / "placement", "--config", str(config))
    try:
        return _measure(bench, daemon)
    finally:
        daemon.close()


def _measure(bench: Bench, daemon: Daemon) -> list[Figure]:
    dice = random.Random(7)
    asked = [dice.choice(NAMES) for _ in range(QUICK_REQUESTS if bench.quick else REQUESTS)]
    failures: list[str] = []
    watch = CapWatch(daemon)
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        running: list[Future[None]] = []
        for name in asked:
            running.append(pool.submit(_ask, daemon.client, name, text_prompt(bench.seed()), failures))
            if len(running) >= IN_FLIGHT:
                running.pop(0).result()
        for one in running:
            one.result()
    watch.end()
    loads = sum(model.incarnation for model in daemon.client.models())
    ideal = lru_loads(asked, ROOM)
    busy = sum(code == "unloaded" for code in failures)
    what = f"{len(asked)} random requests, {len(NAMES)} models, room for {ROOM}"
    codes = ", ".join(sorted(set(failures)))
    beside = f"{loads} loads, {ideal} of an ideal LRU; {IN_FLIGHT} requests in flight"
    return [
        at_most(f"{what}: loads over an ideal LRU", [loads / ideal], 1.1, "", beside=beside),
        at_most("the same: failed requests", [len(failures)], 0, "", digits=0, beside=codes),
        at_most("the same: evictions of busy models", [busy], 0, "", digits=0),
        at_most(
            "the same: sum of caps over the budget, largest", [watch.most], 1.0, "", beside=f"{watch.looks} looks"
        ),
    ]


def lru_loads(asked: list[str], room: int) -> int:
    """Loads of a cache that evicts the least recently used, one request after the other."""
    kept: OrderedDict[str, None] = OrderedDict()
    loads = 0
    for name in asked:
        if name not in kept:
            loads += 1
            if len(kept) >= room:
                kept.popitem(last=False)
        kept[name] = None
        kept.move_to_end(name)
    return loads


def _ask(client: Client, name: str, prompt: str, failures: list[str]) -> None:
    try:
        if not client.complete(name, prompt=prompt, max_tokens=TOKENS).tokens:
            failures.append("empty")
    except BulkheadError as error:
        failures.append(error.code.value)
