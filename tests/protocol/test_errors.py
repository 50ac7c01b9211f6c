"""Codes and their exceptions: one class for each code, the right one, and nothing lost on the way."""

from __future__ import annotations

import pytest
from mlx_bulkhead.protocol import errors
from mlx_bulkhead.protocol.errors import RETRYABLE, BulkheadError, ErrorCode, error_for

CLASSES: dict[ErrorCode, type[BulkheadError]] = {
    ErrorCode.BAD_REQUEST: errors.BadRequest,
    ErrorCode.CONTEXT_OVERFLOW: errors.ContextOverflow,
    ErrorCode.TOO_LARGE: errors.TooLarge,
    ErrorCode.UNKNOWN_MODEL: errors.UnknownModel,
    ErrorCode.UNSUPPORTED: errors.Unsupported,
    ErrorCode.LOAD_FAILED: errors.LoadError,
    ErrorCode.QUEUE_FULL: errors.QueueFull,
    ErrorCode.OUT_OF_MEMORY: errors.OutOfMemory,
    ErrorCode.WORKER_CRASHED: errors.WorkerCrashed,
    ErrorCode.WORKER_STALLED: errors.WorkerStalled,
    ErrorCode.UNLOADED: errors.ModelUnloaded,
    ErrorCode.SHUTTING_DOWN: errors.ShuttingDown,
    ErrorCode.QUARANTINED: errors.Quarantined,
    ErrorCode.DISCONNECTED: errors.Disconnected,
    ErrorCode.TIMEOUT: errors.RequestTimeout,
    ErrorCode.PROTOCOL: errors.ProtocolMismatch,
    ErrorCode.INTERNAL: errors.InternalError,
}


@pytest.mark.parametrize("code", list(ErrorCode))
def test_each_code_has_its_class(code: ErrorCode) -> None:
    error = error_for(code.value, "what happened", request_id="abc")
    assert type(error) is CLASSES[code]
    assert error.code is code
    assert error.retryable is (code in RETRYABLE)
    assert (error.message, error.request_id) == ("what happened", "abc")
    assert str(error) == f"what happened [{code.value}]"


def test_no_two_codes_share_a_class() -> None:
    assert len(set(CLASSES.values())) == len(CLASSES) == len(ErrorCode)


def test_a_code_of_a_newer_version_becomes_the_base_class() -> None:
    error = error_for("too_hot", "the machine is too hot")
    assert type(error) is BulkheadError
    assert "too hot" in str(error)
    assert "too_hot" in str(error)


def test_too_large_and_context_overflow_are_bad_requests() -> None:
    assert issubclass(errors.TooLarge, errors.BadRequest)
    assert issubclass(errors.ContextOverflow, errors.BadRequest)
