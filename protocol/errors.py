"""The closed set of error codes, and the typed exception that each becomes in Python."""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Every reason for which a request or a load can fail."""

    BAD_REQUEST = "bad_request"
    """A field is missing, ill-typed or out of range. The message names the field and the range."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The prompt leaves no room for an answer within the model's context limit."""
    TOO_LARGE = "too_large"
    """A frame or a field is over its size limit."""
    UNKNOWN_MODEL = "unknown_model"
    """No model of that name is loaded or configured."""
    UNSUPPORTED = "unsupported"
    """The request asks for something that this model or engine cannot do."""
    LOAD_FAILED = "load_failed"
    """The model could not be loaded. The message names the file and what was expected."""
    QUEUE_FULL = "queue_full"
    """The bounded queue of the model is full."""
    OUT_OF_MEMORY = "out_of_memory"
    """A memory limit would be, or was, exceeded."""
    WORKER_CRASHED = "worker_crashed"
    """The worker process died and the request was not or could not be resumed."""
    WORKER_STALLED = "worker_stalled"
    """The worker made no progress within its budget and was replaced."""
    UNLOADED = "unloaded"
    """The model was unloaded while the request was waiting or running."""
    SHUTTING_DOWN = "shutting_down"
    """The daemon or the embedding application is ending."""
    QUARANTINED = "quarantined"
    """The same prompt ended two workers shortly before; it is refused for a while."""
    DISCONNECTED = "disconnected"
    """The daemon went away. Made by the client, never sent."""
    TIMEOUT = "timeout"
    """No answer within the client's own time limit. Made by the client, never sent."""
    PROTOCOL = "protocol"
    """The peer speaks another protocol version or sent a frame that makes no sense here."""
    INTERNAL = "internal"
    """A fault of this software. Please report it."""


RETRYABLE: frozenset[ErrorCode] = frozenset(
    {
        ErrorCode.QUEUE_FULL,
        ErrorCode.OUT_OF_MEMORY,
        ErrorCode.WORKER_CRASHED,
        ErrorCode.WORKER_STALLED,
        ErrorCode.UNLOADED,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.QUARANTINED,
        ErrorCode.DISCONNECTED,
        ErrorCode.TIMEOUT,
    }
)
"""Codes for which the same request can succeed later."""


class BulkheadError(Exception):
    """Base of every error that a client raises. `code` is one of `ErrorCode`."""

    code: ErrorCode = ErrorCode.INTERNAL

    def __init__(self, message: str, *, code: ErrorCode | None = None, request_id: str = "") -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        self.message = message
        self.request_id = request_id

    @property
    def retryable(self) -> bool:
        return self.code in RETRYABLE

    def __str__(self) -> str:
        return f"{self.message} [{self.code.value}]"


class BadRequest(BulkheadError):
    code = ErrorCode.BAD_REQUEST


class ContextOverflow(BadRequest):
    code = ErrorCode.CONTEXT_OVERFLOW


class TooLarge(BadRequest):
    code = ErrorCode.TOO_LARGE


class UnknownModel(BulkheadError):
    code = ErrorCode.UNKNOWN_MODEL


class Unsupported(BulkheadError):
    code = ErrorCode.UNSUPPORTED


class LoadError(BulkheadError):
    code = ErrorCode.LOAD_FAILED


class QueueFull(BulkheadError):
    code = ErrorCode.QUEUE_FULL


class OutOfMemory(BulkheadError):
    code = ErrorCode.OUT_OF_MEMORY


class WorkerCrashed(BulkheadError):
    code = ErrorCode.WORKER_CRASHED


class WorkerStalled(WorkerCrashed):
    code = ErrorCode.WORKER_STALLED


class ModelUnloaded(BulkheadError):
    code = ErrorCode.UNLOADED


class ShuttingDown(BulkheadError):
    code = ErrorCode.SHUTTING_DOWN


class Quarantined(BulkheadError):
    code = ErrorCode.QUARANTINED


class Disconnected(BulkheadError):
    code = ErrorCode.DISCONNECTED


class RequestTimeout(BulkheadError):
    code = ErrorCode.TIMEOUT


class ProtocolMismatch(BulkheadError):
    code = ErrorCode.PROTOCOL


class InternalError(BulkheadError):
    code = ErrorCode.INTERNAL


_BY_CODE: dict[ErrorCode, type[BulkheadError]] = {
    cls.code: cls
    for cls in (
        BadRequest,
        ContextOverflow,
        TooLarge,
        UnknownModel,
        Unsupported,
        LoadError,
        QueueFull,
        OutOfMemory,
        WorkerCrashed,
        WorkerStalled,
        ModelUnloaded,
        ShuttingDown,
        Quarantined,
        Disconnected,
        RequestTimeout,
        ProtocolMismatch,
        InternalError,
    )
}


def error_for(code: str, message: str, *, request_id: str = "") -> BulkheadError:
    """The typed exception for a code. A code that this version does not know becomes the base class."""
    try:
        known = ErrorCode(code)
    except ValueError:
        return BulkheadError(f"{message} (code {code})", request_id=request_id)
    return _BY_CODE[known](message, request_id=request_id)
