"""Requests, loads, unloads and evictions at random: the caps of all live workers never exceed the budget."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from mlx_bulkhead.orchestrator.options import LoadOptions, make_load
from mlx_bulkhead.orchestrator.sizes import predict_load

from mlx_bulkhead import BulkheadError, Client

from .. import tiny
from ..bench import Bench
from ..caps import CapWatch
from ..daemon import Daemon
from ..measure import Figure, at_most
from ..work import text_prompt

SECONDS, QUICK_SECONDS = 600.0, 30.0
CLIENTS = 3
TOKENS = 48
PAUSE_S = 2.0
"""Between two deeds of the one that meddles, at most."""
WORKING_CONTEXT = 2048
MODELS: dict[str, tuple[str, LoadOptions]] = {
    "one": ("qwen3", {"context_limit": 2048}),
    "two": ("llama", {"context_limit": 4096}),
    "three": ("gemma3_text", {}),
}
EXPECTED = frozenset({"unloaded"})
"""Ends of requests that the meddler asks for."""


def caps(bench: Bench) -> list[Figure]:
    shares: list[int] = []
    text = ""
    for name, (architecture, options) in MODELS.items():
        folder = tiny.make(bench.folder / f"caps-{name}", architecture)
        shares.append(predict_load(make_load(name, str(folder), options), WORKING_CONTEXT).share)
        text += f'[models.{name}]\nmodel = "{folder}"\n' + "".join(f"{key} = {n}\n" for key, n in options.items())
    budget = sum(sorted(shares)[1:])  # any two, and not three
    config = bench.folder / "caps.toml"
    head = f"[memory]\nbudget = {budget}\nworking_context = {WORKING_CONTEXT}\nmin_residency_s = 0\n"
    config.write_text(head + text)
    daemon = Daemon(bench.folder / "caps", "--config", str(config))
    try:
        return _measure(bench, daemon)
    finally:
        daemon.close()


def _measure(bench: Bench, daemon: Daemon) -> list[Figure]:
    until = time.monotonic() + (QUICK_SECONDS if bench.quick else SECONDS)
    ends: list[str] = []
    watch = CapWatch(daemon)
    ended = threading.Event()
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        meddler = pool.submit(_meddle, daemon, ended)
        asking = [pool.submit(_ask, daemon, bench.seed(), until, ends) for _ in range(CLIENTS)]
        for one in asking:
            one.result()
        ended.set()
        deeds = meddler.result()
    watch.end()
    loads = sum(model.incarnation for model in daemon.client.models())
    failed = [end for end in ends if end and end not in EXPECTED]
    what = f"caps of all workers over the budget, largest in {SECONDS / 60:.0f} mixed minutes"
    if bench.quick:
        what = f"caps of all workers over the budget, largest in {QUICK_SECONDS:.0f} mixed seconds"
    beside = (
        f"{watch.looks} looks, two workers or more at {watch.crowded}; {len(ends)} requests, {loads} loads, "
        f"{deeds} loads, unloads and restarts by hand"
    )
    codes = ", ".join(sorted(set(failed)))
    return [
        at_most(what, [watch.most], 1.0, "", digits=3, beside=beside),
        at_most("the same: requests that failed", [len(failed)], 0, "", digits=0, beside=codes),
    ]


def _ask(daemon: Daemon, seed: int, until: float, ends: list[str]) -> None:
    dice = random.Random(seed)
    with Client(daemon.run_dir) as client:
        while time.monotonic() < until:
            prompt = text_prompt(dice.randrange(10**9))
            try:
                result = client.complete(dice.choice(list(MODELS)), prompt=prompt, max_tokens=dice.randint(1, TOKENS))
                ends.append("" if result.tokens else "empty")
            except BulkheadError as error:
                ends.append(error.code.value)


def _meddle(daemon: Daemon, ended: threading.Event) -> int:
    """Loads, unloads and restarts by hand, until the others are done."""
    dice, deeds = random.Random(3), 0
    with Client(daemon.run_dir) as client:
        while not ended.wait(dice.random() * PAUSE_S):
            name = dice.choice(list(MODELS))
            deeds += 1
            try:
                match dice.randrange(3):
                    case 0:
                        client.unload(name)
                    case 1:
                        client.restart(name)
                    case _:
                        client.complete(name, prompt="x", max_tokens=1)
            except BulkheadError as error:
                if error.code.value not in EXPECTED:
                    raise
    return deeds
