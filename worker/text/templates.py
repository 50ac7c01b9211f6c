"""Renders messages with the model's chat template, and encodes prompts.

The caller's messages are never changed: the template gets copies.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any

from ...protocol.errors import ErrorCode
from ...protocol.values import ChatMessage, TemplateInfo
from ..engines.base import Refused

_HINTS = frozenset(("enable_thinking", "reasoning_effort", "preserve_thinking"))
"""Arguments that a renderer may do without, as a Jinja template does with a variable that it does not know."""

_FORMATS = (
    ("chatml", ("<|im_start|>",)),
    ("llama3", ("<|start_header_id|>", "<|end_header_id|>")),
    ("mistral", ("[INST]",)),
)


def describe(tokenizer: Any, overridden: bool) -> TemplateInfo:
    """What is known of a tokenizer's chat template."""
    if not tokenizer.has_chat_template:
        return TemplateInfo(overridden=overridden)
    source = _source(tokenizer)
    style = next((name for name, marks in _FORMATS if all(mark in source for mark in marks)), "custom")
    return TemplateInfo(
        has_template=True,
        format=style,
        overridden=overridden,
        thinking=bool(tokenizer.has_thinking),
        tools=bool(tokenizer.has_tool_calling) or "tools" in source,
    )


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Ids of a plain prompt. Special tokens are added unless the text already starts with the first of them."""
    bos = tokenizer.bos_token
    return list(tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos)))


def encode_messages(
    tokenizer: Any,
    messages: list[ChatMessage],
    tools: list[dict[str, Any]] | None,
    template_args: dict[str, Any] | None,
    check: Callable[[str], None] = lambda text: None,
) -> list[int]:
    """Ids of a chat, ready for the assistant's answer. Raises `Refused`.

    `check` sees the text before it is encoded, and may raise.
    """
    text = render(tokenizer, messages, tools, template_args)
    check(text)
    return list(tokenizer.encode(text, add_special_tokens=False))


def render(
    tokenizer: Any,
    messages: list[ChatMessage],
    tools: list[dict[str, Any]] | None = None,
    template_args: dict[str, Any] | None = None,
) -> str:
    """Text of a chat, ready for the assistant's answer. Raises `Refused`."""
    turns = [_as_dict(message, index) for index, message in enumerate(messages)]
    if not tokenizer.has_chat_template:
        if tools:
            raise Refused(ErrorCode.UNSUPPORTED, "this model has no chat template, so it cannot use tools")
        return "\n".join(f"{turn['role']}: {turn.get('content') or ''}" for turn in turns) + "\nassistant:"
    if "developer" not in _source(tokenizer):
        # Templates drop roles that they do not know; a developer's message is a system message to them.
        for turn in turns:
            if turn["role"] == "developer":
                turn["role"] = "system"
    arguments = _arguments(tokenizer, tools, template_args)
    first: Exception | None = None
    for variant in _variants(turns):
        try:
            return _apply(tokenizer, variant, arguments)
        except Exception as error:  # templates raise whatever they like
            first = first or error
    raise Refused(ErrorCode.BAD_REQUEST, f"the chat template refuses these messages: {first}") from first


def _apply(tokenizer: Any, turns: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
    text = tokenizer.apply_chat_template(
        copy.deepcopy(turns), tokenize=False, add_generation_prompt=True, **copy.deepcopy(arguments)
    )
    if not isinstance(text, str):
        raise ValueError(f"it gave {type(text).__name__} instead of text")
    return text


def _arguments(
    tokenizer: Any, tools: list[dict[str, Any]] | None, template_args: dict[str, Any] | None
) -> dict[str, Any]:
    """What the renderer is called with. Raises `Refused` for what it would choke on."""
    arguments = {**(template_args or {}), **({"tools": tools} if tools else {})}
    taken = _taken(tokenizer)
    if taken is None:
        return arguments
    for name in list(arguments):
        if name in taken:
            continue
        if name == "tools":
            raise Refused(ErrorCode.UNSUPPORTED, "this model's chat renderer takes no tools")
        if name not in _HINTS:
            raise Refused(ErrorCode.BAD_REQUEST, f"this model's chat renderer takes no template_args {name}")
        del arguments[name]
    return arguments


def _taken(tokenizer: Any) -> set[str] | None:
    """Names of the arguments that a renderer written in Python takes. None if it takes any, as Jinja does."""
    renderer = getattr(tokenizer, "_chat_template", None)  # mlx-lm's own, which goes before the tokenizer's
    if not callable(renderer):
        inner = getattr(tokenizer, "_tokenizer", None)
        renderer = getattr(inner, "apply_chat_template", tokenizer.apply_chat_template)
    try:
        parameters = inspect.signature(renderer).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    taken = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    # mlx-lm hands enable_thinking over under the renderer's name for it.
    if getattr(tokenizer, "_thinking_kwarg", "enable_thinking") in taken:
        taken.add("enable_thinking")
    return taken


def _variants(turns: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The turns as they are, then with tool arguments as objects, then with one call a turn."""
    yield turns
    if not any(turn.get("tool_calls") for turn in turns):
        return
    parsed = [_parse_arguments(turn) for turn in turns]
    yield parsed
    if any(len(turn.get("tool_calls") or ()) > 1 for turn in parsed):
        yield _one_call_a_turn(parsed)


def _parse_arguments(turn: dict[str, Any]) -> dict[str, Any]:
    turn = copy.deepcopy(turn)
    for call in turn.get("tool_calls") or ():
        function = call.get("function", call)
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except ValueError:
                pass
    return turn


def _one_call_a_turn(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each of several parallel calls becomes a turn of its own, followed by its result."""
    results = {turn["tool_call_id"]: turn for turn in turns if turn.get("tool_call_id")}
    placed: set[str] = set()
    out: list[dict[str, Any]] = []
    for turn in turns:
        calls = turn.get("tool_calls") or ()
        if len(calls) < 2:
            if turn.get("tool_call_id") not in placed:
                out.append(turn)
            continue
        for number, call in enumerate(calls):
            single = {**turn, "tool_calls": [call]}
            if number:
                single["content"] = ""
            out.append(single)
            name = call.get("id")
            if name in results and name not in placed:
                out.append(results[name])
                placed.add(name)
    return out


def _as_dict(message: ChatMessage, index: int) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        for number, part in enumerate(content):
            if part.type != "text":
                raise Refused(
                    ErrorCode.UNSUPPORTED,
                    f"messages[{index}].content[{number}] is an {part.type}; this model takes text only",
                )
        content = "".join(part.text or "" for part in content)
    turn: dict[str, Any] = {"role": message.role, "content": content if content is not None else ""}
    for field in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        value = getattr(message, field)
        if value is not None:
            turn[field] = value
    return turn


def _source(tokenizer: Any) -> str:
    """The template's text; of several named ones, all of them."""
    template = tokenizer.chat_template
    return template if isinstance(template, str) else str(template or "")
