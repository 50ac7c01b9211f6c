"""Decides from a prompt how its answer stands to reasoning: within a block, behind one, or free to open one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TAIL = 8
"""Tokens at a prompt's end in which a template opens or closes a block."""


def thinks(tokenizer: Any) -> bool:
    """Whether the tokenizer has marks for reasoning."""
    marked = bool(getattr(tokenizer, "has_thinking", False))
    return marked and bool(tokenizer.think_start_tokens) and bool(tokenizer.think_end_tokens)


def is_open(tokenizer: Any, prompt: Sequence[int], *, partial: bool) -> bool:
    """Whether the prompt ends within a block: nothing but blanks follows its opening mark.

    Args:
        partial: the prompt may end in mid-reasoning, as a plain one or a message to be continued does, so that any
            text may follow the mark. In a rendered chat, a mark with text behind it is what somebody wrote.
    """
    start = tokenizer.think_start_tokens
    ids = list(prompt if partial else prompt[-(len(start) + TAIL) :])
    opened = tokenizer.rfind_think_start(ids)
    if opened < 0 or tokenizer.rfind_think_end(ids) > opened:
        return False
    return partial or not tokenizer.decode(ids[opened + len(start) :]).strip()


def is_closed(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Whether the template has closed a block right at the end, so that no other one comes."""
    return tokenizer.rfind_think_end(list(prompt[-TAIL:])) >= 0
