"""What really is in memory after an import, in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("mlx", "mlx_lm", "mlx_vlm", "dflash_mlx", "transformers", "tokenizers", "numpy", "torch")
PROGRAM = "import json, sys; import {module}; print(json.dumps(sorted(sys.modules)))"


def loaded_by(module: str) -> set[str]:
    """Names of all modules that importing this one loads."""
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", PROGRAM.format(module=module)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "module",
    [
        "mlx_bulkhead",
        "mlx_bulkhead.protocol",
        "mlx_bulkhead.orchestrator",
        "mlx_bulkhead.orchestrator.cli",
        "mlx_bulkhead.worker",
        "mlx_bulkhead.worker.__main__",
    ],
)
def test_importing_loads_no_model_library(module: str) -> None:
    assert not loaded_by(module) & set(HEAVY)


def test_importing_the_protocol_loads_no_socket_library() -> None:
    loaded = loaded_by("mlx_bulkhead.protocol")
    assert not loaded & {"zmq", "psutil", "asyncio", "mlx_bulkhead.worker", "mlx_bulkhead.orchestrator"}


def test_importing_the_front_package_is_lazy() -> None:
    assert not loaded_by("mlx_bulkhead") & {"zmq", "msgspec", "asyncio", "typer", "rich"}


def test_importing_the_worker_leaves_the_orchestrator_out() -> None:
    loaded = loaded_by("mlx_bulkhead.worker.__main__")
    assert not [name for name in loaded if name.startswith("mlx_bulkhead.orchestrator")]
