"""Writes golden.json: the bytes of every sample message.

Run `python -m tests.protocol.make_golden` after a message has gained a field with a default. A changed or
removed line in the diff, other than of a `full` sample, means that the protocol is no longer compatible.
"""

from __future__ import annotations

import json
from pathlib import Path

from mlx_bulkhead.protocol import codec

from .samples import NAMED, REQUEST_ID

PATH = Path(__file__).with_name("golden.json")


def golden() -> dict[str, dict[str, str]]:
    """Head and body of each sample, in hexadecimal."""
    frames = {name: codec.encode(message, REQUEST_ID) for name, message in NAMED.items()}
    return {name: {"head": head.hex(), "body": body.hex()} for name, (head, body) in frames.items()}


def main() -> None:
    PATH.write_text(json.dumps(golden(), indent=1) + "\n", encoding="ascii")
    print(f"{len(NAMED)} messages written to {PATH.name}")


if __name__ == "__main__":
    main()
