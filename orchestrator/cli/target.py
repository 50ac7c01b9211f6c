"""Finds who serves a model that `run` or `chat` names: the daemon, or an orchestrator just for the command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...protocol.errors import Disconnected, UnknownModel
from .common import is_path, run_dir_of

if TYPE_CHECKING:
    from ..client import Client


@contextmanager
def serving(model: str, run_dir: Path | None) -> Iterator[tuple[Client, str]]:
    """A client and the name under which it serves the model.

    The daemon's if it knows the name, or has the path loaded. Else a path or hub id is loaded here, for the
    life of the block, and leaves the daemon alone.
    """
    client, missing = _daemon(run_dir)
    if client is not None:
        with client:
            name = _known(client, model)
            if name is not None:
                yield client, name
                return
        missing = UnknownModel(f"the daemon has no model {model!r}, and it is no path; see bulkhead ps")
    if not is_path(model):
        raise missing
    from .local import local_client
    from .progress import load_progress

    with local_client() as client:
        with load_progress(_short(model)) as show:
            client.load("model", model, on_progress=show)
        yield client, "model"


def _daemon(run_dir: Path | None) -> tuple[Client | None, Disconnected | UnknownModel]:
    from ..client import Client

    try:
        return Client(run_dir_of(run_dir)), UnknownModel("")
    except Disconnected as error:
        return None, error


def _short(model: str) -> str:
    """The last part of a path or hub id: enough to show while it loads."""
    from ..options import local_path

    return Path(local_path(model)).name or model


def _known(client: Client, model: str) -> str | None:
    from ..options import local_path

    path = local_path(model)
    models = client.models()
    by_name = [status.name for status in models if status.name == model]
    by_path = [status.name for status in models if status.model == path and status.pid is not None]
    return next(iter(by_name + by_path), None)
