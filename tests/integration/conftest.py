"""Real daemons with real MLX: a process of `bulkhead serve`, and reference answers of plain mlx-lm."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlx_bulkhead import Client


@dataclass
class Daemon:
    """A running daemon. It has the model `tiny` loaded if the fixture says so."""

    process: subprocess.Popen[str]
    run_dir: Path

    def client(self) -> Client:
        return Client(self.run_dir)


def start_daemon(run_dir: Path, *arguments: str) -> Daemon:
    """Start `bulkhead serve` and wait until it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_bulkhead.orchestrator", "--run-dir", str(run_dir), *arguments],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("bulkhead ready"):
            return Daemon(process, run_dir)
    raise RuntimeError(f"the daemon ended with {process.wait()}")


def stop_daemon(daemon: Daemon) -> int:
    """SIGTERM; the exit code."""
    if daemon.process.poll() is None:
        daemon.process.terminate()
    _, _ = daemon.process.communicate(timeout=15)
    return daemon.process.returncode


@pytest.fixture(scope="session")
def daemon(tiny_model: Path) -> Iterator[Daemon]:
    """One daemon for all tests that do it no harm, with the tiny qwen3 model loaded as `tiny`."""
    with tempfile.TemporaryDirectory(prefix="bh-", dir="/tmp") as folder:
        running = start_daemon(Path(folder) / "run")
        with running.client() as client:
            client.load("tiny", tiny_model)
        yield running
        stop_daemon(running)


@pytest.fixture
def own_daemon(short_tmp: Path) -> Iterator[Daemon]:
    """A daemon that the test may kill."""
    running = start_daemon(short_tmp / "run")
    yield running
    if running.process.poll() is None:
        running.process.kill()
    running.process.communicate(timeout=15)


Reference = Callable[..., dict[str, object]]

_REFERENCE = """
import json, sys
from mlx_lm import load, stream_generate
path, jobs = sys.argv[1], json.loads(sys.stdin.read())
model, tokenizer = load(path)
out = []
for job in jobs:
    prompt = job["prompt"]
    if isinstance(prompt, list):
        how = "continue_final_message" if job.get("continued") else "add_generation_prompt"
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, **{how: True})
        prompt = tokenizer.encode(prompt, add_special_tokens=False)
    text, tokens = "", []
    for response in stream_generate(model, tokenizer, prompt, max_tokens=job["max_tokens"]):
        text += response.text
        tokens.append(response.token)
    out.append({"text": text, "tokens": tokens, "finish_reason": response.finish_reason})
print(json.dumps(out))
"""


def reference(model: Path, jobs: list[dict[str, object]]) -> list[dict[str, object]]:
    """What plain mlx-lm gives, greedy, in a process of its own. A job has `prompt` and `max_tokens`.

    With `continued`, the answer goes on from the last message of `prompt`.
    """
    done = subprocess.run(
        [sys.executable, "-c", _REFERENCE, str(model)],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
