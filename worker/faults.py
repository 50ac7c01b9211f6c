"""Says what an exception means for this process. Pure, without MLX."""

from __future__ import annotations

_OUT_OF_MEMORY = (
    "out of memory",
    "unable to allocate",
    "attempting to allocate",
    "bad_alloc",
    "insufficient memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out; MLX says so with plain `RuntimeError`s."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)


def say(error: BaseException) -> str:
    """Type and message in one line of text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
