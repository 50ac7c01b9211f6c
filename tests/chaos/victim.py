"""A client process that will be killed: `python -m tests.chaos.victim RUN_DIR`, cases as JSON on stdin.

Says `<request id> <case>` on stdout once a request streams, and `wrong …` for a wrong answer. Its requests are
detached, so that what it leaves can be picked up.
"""

from __future__ import annotations

import json
import random
import sys
import time

from mlx_bulkhead import BulkheadError, Client


def main(run_dir: str) -> None:
    """Ask until killed."""
    cases: list[list[object]] = json.loads(sys.stdin.readline())
    while True:
        try:
            with Client(run_dir) as client:
                while True:
                    one(client, random.randrange(len(cases)), cases)
        except BulkheadError:
            time.sleep(0.2)


def one(client: Client, index: int, cases: list[list[object]]) -> None:
    model, prompt, length, text = cases[index]
    stream = client.generate(str(model), prompt=str(prompt), max_tokens=int(str(length)), detached=True)
    for snap in stream:
        if snap.usage.completion_tokens == len(snap.tokens):
            print(stream.request_id, index, flush=True)
    if (got := stream.result().text) != text:
        print("wrong", repr(got), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
