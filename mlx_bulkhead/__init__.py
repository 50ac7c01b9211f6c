"""Run MLX models in worker processes of their own.

`Orchestrator` embeds them in an asyncio application; `Client` and `AsyncClient` talk to a daemon
(`bulkhead serve`). Names are imported when first used: importing this package costs nothing.
"""

# pyright: reportMissingImports=false
# In a checkout the subpackages lie beside this folder; installed, they lie in it.
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .orchestrator.async_client import AsyncClient
    from .orchestrator.client import Client
    from .orchestrator.config import Config, ConfigError, load_config
    from .orchestrator.embedded import Orchestrator
    from .orchestrator.run_dir import RunDirBusy
    from .orchestrator.views import Result, Snap
    from .protocol.errors import (
        BadRequest,
        BulkheadError,
        ContextOverflow,
        Disconnected,
        ErrorCode,
        InternalError,
        LoadError,
        ModelUnloaded,
        OutOfMemory,
        ProtocolMismatch,
        Quarantined,
        QueueFull,
        RequestTimeout,
        ShuttingDown,
        TooLarge,
        UnknownModel,
        Unsupported,
        WorkerCrashed,
        WorkerStalled,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "BadRequest",
    "BulkheadError",
    "Client",
    "Config",
    "ConfigError",
    "ContextOverflow",
    "Disconnected",
    "ErrorCode",
    "InternalError",
    "LoadError",
    "ModelUnloaded",
    "Orchestrator",
    "OutOfMemory",
    "ProtocolMismatch",
    "Quarantined",
    "QueueFull",
    "RequestTimeout",
    "Result",
    "RunDirBusy",
    "ShuttingDown",
    "Snap",
    "TooLarge",
    "UnknownModel",
    "Unsupported",
    "WorkerCrashed",
    "WorkerStalled",
    "load_config",
]

_HOMES = {
    "AsyncClient": "orchestrator.async_client",
    "Client": "orchestrator.client",
    "Config": "orchestrator.config",
    "ConfigError": "orchestrator.config",
    "Orchestrator": "orchestrator.embedded",
    "Result": "orchestrator.views",
    "RunDirBusy": "orchestrator.run_dir",
    "Snap": "orchestrator.views",
    "load_config": "orchestrator.config",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "protocol.errors")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
