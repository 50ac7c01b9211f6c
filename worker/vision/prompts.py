"""Renders a chat with pictures: the model's template first, then what `recovery` allows."""

from __future__ import annotations

import secrets
from typing import Any

from ...protocol.commands import Generate
from ...protocol.values import ChatMessage
from ..text.templates import render
from ..text.turns import as_dict
from .recovery import Asked, Attempt, settle

_CONTROLS = ("enable_thinking", "reasoning_effort", "preserve_thinking", "thinking")


class Turns:
    """A tokenizer whose template gets what it reads: text as a string, or always as a list of parts.

    Many templates of vision models go through the parts of a message, and lose a string without a word.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._inner = tokenizer
        self.lists = tokenizer.has_chat_template and self._wants_lists()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply_chat_template(self, turns: list[dict[str, Any]], **arguments: Any) -> Any:
        """The template's text of some turns."""
        return self._inner.apply_chat_template(listed(turns) if self.lists else turns, **arguments)

    def _wants_lists(self) -> bool:
        word = f"probe{secrets.token_hex(6)}"
        turns = [{"role": "user", "content": word}]
        shown = []
        for variant in (turns, listed(turns)):
            try:
                text = self._inner.apply_chat_template(variant, tokenize=False, add_generation_prompt=True)
            except Exception:  # templates raise whatever they like
                text = ""
            shown.append(isinstance(text, str) and word in text and "'type'" not in text and '"type"' not in text)
        return shown == [False, True]


def listed(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of turns in which all content is a list of parts."""
    return [
        {**turn, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else turn
        for turn, content in ((turn, turn.get("content")) for turn in turns)
    ]


def render_chat(
    tokenizer: Turns, processor: Any, config: Any, request: Generate, messages: list[ChatMessage], images: int
) -> str:
    """The prompt's text, with the model's mark for each picture. Raises `Refused`."""
    turns = [as_dict(message, index, images=True) for index, message in enumerate(messages)]
    arguments = request.template_args or {}
    asked = Asked(turns, images, bool(request.tools) or any(arguments.get(name) is not None for name in _CONTROLS))
    attempt = Attempt()
    try:
        attempt = Attempt(
            render(
                tokenizer,
                messages,
                request.tools,
                request.template_args,
                continue_final=request.continue_final,
                images=True,
            )
        )
    except Exception as error:
        attempt = Attempt(error=error)

    def registered() -> str | None:
        from mlx_vlm import prompt_utils

        kind = getattr(config, "model_type", None)
        if kind not in prompt_utils.MODEL_CONFIG or request.continue_final:
            return None
        made: Any = prompt_utils.apply_chat_template(processor, {"model_type": kind}, turns, num_images=images)
        return made

    return settle(attempt, asked, registered)
