"""The adapters of one model since its load: what was added or dropped, and who waits for the worker's answer.

Its supervisor owns it. A change counts once the worker in charge has made it; from then on every worker of the model
loads with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from ..protocol import codec
from ..protocol.checks_names import in_use, known
from ..protocol.codec import Message
from ..protocol.commands import AddAdapter, DropAdapter, Load
from ..protocol.errors import BadRequest, ErrorCode, error_for
from ..protocol.events import AdaptersReply, Failed
from ..protocol.values import AdapterInfo, WorkerInfo
from .dispatch import Dispatcher
from .policy.lifecycle import State

log = logging.getLogger(__name__)

Change = AddAdapter | DropAdapter


class Model(Protocol):
    """The supervisor, as its book sees it."""

    load: Load
    """As it was asked for."""

    @property
    def state(self) -> State: ...

    async def wait_loaded(self) -> WorkerInfo:
        """Ask for the model and wait until it is READY."""
        ...


class _Asked(NamedTuple):
    change: Change
    answer: asyncio.Future[list[AdapterInfo]]


class AdapterBook:
    """Changes that were made, and those that a worker was asked for."""

    def __init__(self, model: Model, requests: Dispatcher, send: Callable[[Message, bytes], str]) -> None:
        """`send` sends to the worker in charge."""
        self._model = model
        self._requests = requests
        self._send = send
        self._now: dict[str, str] | None = None
        """Name → directory. None: as loaded."""
        self._infos: list[AdapterInfo] = []
        self._asked: dict[bytes, _Asked] = {}

    @property
    def load(self) -> Load:
        """The load as the next worker gets it: with what was changed since."""
        load = self._model.load
        return load if self._now is None else msgspec.structs.replace(load, adapters=self._now)

    def forget(self) -> None:
        """The model is gone, or gets another load."""
        self._now = None

    async def change(self, change: Change) -> list[AdapterInfo]:
        """Add or drop an adapter without a reload; gives all that there are then. Raises typed errors.

        A model that is not loaded is loaded first, but not to drop one: for this very adapter it may not load.
        """
        if isinstance(change, DropAdapter):
            self._check_drop(change.name)
            if self._model.state in (State.STOPPED, State.BACKOFF, State.FAILED):
                self._note(change)
                return []
        while self._model.state is not State.READY:
            await self._model.wait_loaded()
        return await self._ask(change)

    def _check_drop(self, name: str) -> None:
        """Raise `BadRequest` if an adapter cannot be dropped now, for reasons that need no worker."""
        load = self.load
        if name not in load.adapters:
            raise BadRequest(f"no adapter {name[:60]!r}, {known(load.adapters)}")
        if name == load.adapter:
            raise BadRequest(
                f"adapter {name!r} serves the requests that name none: it came as the default of the load. "
                "Unload the model and load it without"
            )
        if users := sum(request.message.adapter == name for request in self._requests.all()):
            raise BadRequest(in_use(name, users).message)

    def _note(self, change: Change) -> None:
        """A change is made."""
        adapters = dict(self.load.adapters)
        if isinstance(change, AddAdapter):
            adapters[change.name] = change.path
        else:
            adapters.pop(change.name, None)
        self._now = adapters

    # ---- the worker in charge ----------------------------------------------------------------------------

    async def _ask(self, change: Change) -> list[AdapterInfo]:
        """Let the worker make a change; gives its adapters then. Raises the typed error of its refusal, or end."""
        request_id = codec.new_request_id()
        answer: asyncio.Future[list[AdapterInfo]] = asyncio.get_running_loop().create_future()
        self._asked[request_id] = _Asked(change, answer)  # stays until answered, also if the caller gives up
        self._send(change, request_id)
        return await answer

    def ask_again(self) -> None:
        """Another worker is in charge, which was not asked yet."""
        for request_id, asked in self._asked.items():
            self._send(asked.change, request_id)

    def asked(self, request_id: bytes) -> bool:
        """Whether the worker was asked under this id."""
        return request_id in self._asked

    def answered(self, kind: int, request_id: bytes, body: bytes) -> bool:
        """Take the worker's answer; gives whether it made the change."""
        change, answer = self._asked.pop(request_id)
        try:
            message: Message = codec.decode_body(kind, request_id, body)
        except codec.FrameError as error:
            message = Failed(ErrorCode.PROTOCOL, str(error))
        if isinstance(message, AdaptersReply):
            self._note(change)
            self._infos = message.adapters
            if not answer.done():
                answer.set_result(message.adapters)
            return True
        if not isinstance(message, Failed):
            message = Failed(ErrorCode.PROTOCOL, f"the worker answered with {type(message).__name__}")
        log.warning("%s: adapter %r: %s", change.model, change.name, message.message)
        if not answer.done():
            answer.set_exception(error_for(message.code, message.message))
        return False

    def told_of(self, info: WorkerInfo | None) -> WorkerInfo | None:
        """What the worker said of itself at its load, with the adapters that it has by now."""
        return None if info is None else msgspec.structs.replace(info, adapters=self._infos)

    def lost(self, code: ErrorCode, words: str) -> None:
        """The worker is gone. A change that it did not answer is not tried again: it may have been the cause."""
        waiting, self._asked = list(self._asked.values()), {}
        for change, answer in waiting:
            if not answer.done():
                what = "added" if isinstance(change, AddAdapter) else "dropped"
                answer.set_exception(
                    error_for(code, f"{words} before it answered; adapter {change.name!r} is not {what}")
                )
