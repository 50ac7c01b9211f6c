"""Renders messages with the model's chat template, and encodes prompts.

The caller's messages are never changed: the template gets copies.
"""

from __future__ import annotations

import copy
import inspect
import secrets
from collections.abc import Callable
from typing import Any

from ...protocol.errors import ErrorCode
from ...protocol.values import ChatMessage, TemplateInfo
from ..engines.base import Refused
from .turns import as_dict, variants

_HINTS = frozenset(("enable_thinking", "reasoning_effort", "preserve_thinking"))
"""Arguments that a renderer may do without, as a Jinja template does with a variable that it does not know."""

OWN_TEMPLATE = "own_chat_template"
"""Attribute of a tokenizer that holds the checkpoint's template when the load replaced it."""

_FORMATS = (
    ("chatml", ("<|im_start|>",)),
    ("llama3", ("<|start_header_id|>", "<|end_header_id|>")),
    ("mistral", ("[INST]",)),
)


def describe(tokenizer: Any, overridden: bool) -> TemplateInfo:
    """What is known of a tokenizer's chat template."""
    if not tokenizer.has_chat_template:
        return TemplateInfo(overridden=overridden, **_specials(tokenizer))
    source = _source(tokenizer)
    style = next((name for name, marks in _FORMATS if all(mark in source for mark in marks)), "custom")
    return TemplateInfo(
        has_template=True,
        format=style,
        overridden=overridden,
        thinking=bool(tokenizer.has_thinking),
        tools=bool(tokenizer.has_tool_calling) or "tools" in source,
        **_specials(tokenizer),
    )


def _specials(tokenizer: Any) -> dict[str, Any]:
    """Which of the special tokens the tokenizer has."""
    return {name: getattr(tokenizer, f"{name}_token", None) is not None for name in ("bos", "eos", "pad")}


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
    *,
    continue_final: bool = False,
) -> list[int]:
    """Ids of a chat, ready for the assistant's answer. Raises `Refused`.

    `check` sees the text before it is encoded, and may raise.
    """
    text = render(tokenizer, messages, tools, template_args, continue_final=continue_final)
    check(text)
    return list(tokenizer.encode(text, add_special_tokens=False))


def render(
    tokenizer: Any,
    messages: list[ChatMessage],
    tools: list[dict[str, Any]] | None = None,
    template_args: dict[str, Any] | None = None,
    *,
    continue_final: bool = False,
    images: bool = False,
) -> str:
    """Text of a chat, ready for the assistant's answer. Raises `Refused`.

    With `continue_final` the text ends where the last message does, so that the answer goes on with it.
    With `images`, parts that are images stay in the turns.
    """
    turns = [as_dict(message, index, images) for index, message in enumerate(messages)]
    if not tokenizer.has_chat_template:
        if tools:
            raise Refused(ErrorCode.UNSUPPORTED, "this model has no chat template, so it cannot use tools")
        text = "\n".join(f"{turn['role']}: {turn.get('content') or ''}" for turn in turns)
        return text if continue_final else text + "\nassistant:"
    if "developer" not in _source(tokenizer):
        # Templates drop roles that they do not know; a developer's message is a system message to them.
        for turn in turns:
            if turn["role"] == "developer":
                turn["role"] = "system"
    arguments = _arguments(tokenizer, tools, template_args)
    first: Exception | None = None
    for variant in variants(turns):
        try:
            text = _apply(tokenizer, variant, arguments, continue_final)
        except Refused:
            raise
        except Exception as error:  # templates raise whatever they like
            first = first or error
            continue
        return _with_tools(tokenizer, variant, arguments, continue_final, text) if tools else text
    raise Refused(ErrorCode.BAD_REQUEST, f"the chat template refuses these messages: {first}") from first


def _with_tools(
    tokenizer: Any, turns: list[dict[str, Any]], arguments: dict[str, Any], continue_final: bool, text: str
) -> str:
    """`text`, or what the checkpoint's own template makes if the one in use drops the tools. Raises `Refused`."""
    if not _drops_tools(tokenizer, turns, arguments, continue_final, text):
        return text
    for template in _own_templates(tokenizer):
        own = {**arguments, "chat_template": template}
        try:
            other = _apply(tokenizer, turns, own, continue_final)
        except Exception:  # it is only a fallback; the refusal below names what the user can change
            continue
        if not _drops_tools(tokenizer, turns, own, continue_final, other):
            return other
    raise Refused(
        ErrorCode.UNSUPPORTED,
        f"the chat template drops the {len(arguments['tools'])} tools: its text is the same without them; "
        "leave tools out, or load the model with a chat_template that shows them",
    )


def _drops_tools(
    tokenizer: Any, turns: list[dict[str, Any]], arguments: dict[str, Any], continue_final: bool, text: str
) -> bool:
    without = {name: value for name, value in arguments.items() if name != "tools"}
    if isinstance(tokenizer.chat_template, dict) and "chat_template" not in without:
        # Several named ones: tools choose another template, which by itself is no sign that it shows them.
        named = tokenizer.chat_template
        without["chat_template"] = named.get("tool_use", named.get("default"))
    try:
        return _apply(tokenizer, turns, without, continue_final) == text
    except Exception:  # it needs tools, so it reads them
        return False


def _own_templates(tokenizer: Any) -> list[str]:
    """Templates that the checkpoint has beside the one in use, the one for tools first."""
    if callable(getattr(tokenizer, "_chat_template", None)):
        return []  # a renderer in Python goes before them
    own = getattr(tokenizer, OWN_TEMPLATE, None)
    named: dict[str, Any] = own if isinstance(own, dict) else {"default": own}
    if isinstance(tokenizer.chat_template, dict):
        named = {**named, **tokenizer.chat_template}
    order = sorted(named, key=lambda name: (name != "tool_use", name != "default"))
    return [named[name] for name in order[:2] if isinstance(named[name], str) and name in ("tool_use", "default")]


def _apply(tokenizer: Any, turns: list[dict[str, Any]], arguments: dict[str, Any], continue_final: bool) -> str:
    turns = copy.deepcopy(turns)
    said = turns[-1]["content"]
    mark = f"END{secrets.token_hex(8)} "
    if continue_final:
        turns[-1]["content"] = said + mark
    text = tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=not continue_final, **copy.deepcopy(arguments)
    )
    if not isinstance(text, str):
        raise ValueError(f"it gave {type(text).__name__} instead of text")
    return _cut(text, said, mark) if continue_final else text


def _cut(text: str, said: str, mark: str) -> str:
    """The text up to the mark behind the last message. Raises `Refused` if the template changed that message."""
    end = text.rfind(mark.rstrip())
    if end < 0 or not text[:end].rstrip().endswith(said.strip()):
        raise Refused(
            ErrorCode.UNSUPPORTED,
            f"continue_final: the chat template changes or drops the last message of {len(said)} characters, so it "
            "cannot be continued; send it without reasoning marks, or ask again without continue_final",
        )
    # A template that trims messages would have trimmed this one too.
    return text[:end] if text[end : end + len(mark)] == mark else text[:end].rstrip()


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


def _source(tokenizer: Any) -> str:
    """The template's text; of several named ones, all of them."""
    template = tokenizer.chat_template
    return template if isinstance(template, str) else str(template or "")
