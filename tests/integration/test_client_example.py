"""docs/client_example.py against the real daemon: the document is enough to write a client."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "docs" / "client_example.py"


async def run_example(run_dir: Path | str, model: str, prompt: str) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr. On the loop, since the daemon may live on it too."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLE),
        str(run_dir),
        model,
        prompt,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), timeout=60)
    return process.returncode, out.decode(), err.decode()


async def test_it_prints_an_answer(daemon: Any) -> None:
    code, out, err = await run_example(daemon.run_dir, "tiny", "Hello")
    assert (code, err) == (0, "")
    assert out


async def test_it_shows_what_the_daemon_refuses(daemon: Any) -> None:
    code, out, err = await run_example(daemon.run_dir, "nobody", "Hello")
    assert (code, out) == (1, "")
    assert "[unknown_model]" in err
    code, out, err = await run_example(daemon.run_dir, "tiny", "  ")
    assert (code, out) == (1, "")
    assert "[bad_request]" in err


async def test_it_notices_that_there_is_no_daemon(short_tmp: Path) -> None:
    code, out, err = await run_example(short_tmp, "tiny", "Hello")
    assert (code, out) == (1, "")
    assert err == "error: no daemon: it was silent for 5 seconds\n"


def test_it_is_short_and_needs_two_packages_only() -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) <= 40
    imported = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
    assert imported - set(sys.stdlib_module_names) == {"msgpack", "zmq"}
