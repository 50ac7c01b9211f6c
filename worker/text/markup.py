"""Which marks an answer of a model may have, and the splitter for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .channels import HarmonySplitter, Splitter, Tags, TagSplitter
from .thinking import is_open, thinks

_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|return|>")


class Markup:
    """What is known of a tokenizer's marks; made once for each loaded model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self._harmony = all(mark in vocabulary for mark in _HARMONY)
        self._thinks = thinks(tokenizer)
        self._calls = bool(getattr(tokenizer, "has_tool_calling", False))

    def blind(self, *, continued: bool = False) -> str:
        """Why tool calls of an answer to a chat cannot be told from its text; empty if they can."""
        if self._harmony and continued:
            why = "a continued answer in the harmony format is not split"
        elif not (self._harmony or self._calls):
            why = "the marks that this model puts around tool calls are not known"
        else:
            return ""
        return f"{why}; whatever the answer has of tool calls is in its text, as it was written"

    def splitter(self, prompt: Sequence[int], tools: bool, *, continued: bool = False) -> Splitter | None:
        """For the answer to a rendered chat; None where all of it is content.

        `continued`: the prompt ends with the beginning of the answer.
        """
        if self._harmony:
            return None if continued else HarmonySplitter()
        tokenizer = self._tokenizer
        tools = tools and self._calls
        if not (self._thinks or tools):
            return None
        inside = self._thinks and is_open(tokenizer, prompt, partial=continued)
        return TagSplitter(
            Tags(
                tokenizer.think_start if self._thinks else "",
                tokenizer.think_end if self._thinks else "",
                tokenizer.tool_call_start if tools else "",
                (tokenizer.tool_call_end or "") if tools else "",
                inside=inside,
                begun=continued and not inside,
            )
        )
