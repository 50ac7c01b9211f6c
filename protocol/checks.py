"""Checks of commands that need no model: ranges, lengths, exactly-one-of. Pure.

A check gives None, or a `Problem` whose message names the field, the value and the range.
What needs the vocabulary or the context limit is checked in the worker.
"""

from __future__ import annotations

import math
import unicodedata
from typing import Any

from . import limits
from .checks_choice import check_format, check_logprobs
from .checks_draft import check_draft
from .checks_images import check_image, check_image_limits, check_images
from .checks_memory import check_memory
from .checks_names import check_adapter, check_adapters, check_change, check_name
from .codec import ID_BYTES
from .commands import AddAdapter, Attach, Command, DropAdapter, Generate, Load, Restart, Shutdown, Stats, Unload
from .errors import ErrorCode
from .problem import Problem
from .problem import bad as _bad
from .values import ROLES, ChatMessage, Part

RESERVED_TEMPLATE_ARGS = frozenset(
    (
        "self",
        "conversation",
        "conversations",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "processor_kwargs",
        "load_audio_from_video",
    )
)
"""Names that steer the rendering itself; a template could not tell them from its own variables."""

KV_BITS = (2, 3, 4, 5, 6, 8)
KV_GROUPS = (32, 64, 128)

_INVISIBLE = frozenset(("Cc", "Cf", "Zl", "Zp", "Zs"))
"""Unicode categories without a mark on paper: controls, format characters, separators."""


def is_blank(text: str) -> bool:
    """Nothing of it can be seen: blanks, controls, zero-width characters."""
    # Most texts show something at once; only for the others is it worth finding the different characters.
    if any(unicodedata.category(char) not in _INVISIBLE for char in text[:64]):
        return False
    return all(unicodedata.category(char) in _INVISIBLE for char in set(text[64:]))


def check(command: Command) -> Problem | None:
    """Ranges of any command, as a client sent it."""
    match command:
        case Generate():
            return check_generate(command)
        case Load():
            return check_load(command)
        case Unload() | Restart():
            return check_name(command.model)
        case AddAdapter() | DropAdapter():
            return check_change(command)
        case Stats():
            return None if command.model is None else check_name(command.model)
        case Attach():
            if len(command.request) != ID_BYTES:
                return _bad(f"request must be an id of {ID_BYTES} bytes, got {len(command.request)}")
            return None
        case Shutdown():
            if not 0.0 <= command.grace_s <= limits.MAX_GRACE_S:  # false for NaN too
                return _bad(f"grace_s must be 0 to {limits.MAX_GRACE_S:g} seconds, got {command.grace_s}")
            return None
        case _:
            return None


def check_load(load: Load) -> Problem | None:
    """Ranges of a `Load`."""
    if problem := check_name(load.name, "name"):
        return problem
    if not load.model.strip() or len(load.model) > limits.MAX_PATH_CHARS:
        return _bad(f"model must be a path or id of 1 to {limits.MAX_PATH_CHARS} characters, got {len(load.model)}")
    if "\0" in load.model:
        return _bad("model must not contain a NUL character")
    for field, value, low, high in (
        ("context_limit", load.context_limit, 1, limits.MAX_TOKENS),
        ("memory_limit", load.memory_limit, limits.MIB, 2**50),
        ("max_running", load.max_running, 1, 1024),
        ("max_queued", load.max_queued, 0, 100_000),
        ("cache_entries", load.cache_entries, 0, 100_000),
        ("cache_bytes", load.cache_bytes, 0, 2**50),
        ("cache_disk_bytes", load.cache_disk_bytes, 0, 2**50),
        ("recycle_requests", load.recycle_requests, 1, limits.MAX_TOKENS),
        ("recycle_footprint", load.recycle_footprint, limits.MIB, 2**50),
        ("max_kv_size", load.max_kv_size, 16, limits.MAX_TOKENS),
        ("size", load.size, 1, 1024),
        ("rank", load.rank, 0, load.size - 1),
    ):
        if value is not None and not low <= value <= high:
            return _bad(f"{field} must be {low} to {high}, got {value}")
    for field, seconds in (("stall_budget_s", load.stall_budget_s), ("recycle_age_s", load.recycle_age_s)):
        if seconds is not None and not (math.isfinite(seconds) and 0.1 <= seconds <= limits.MAX_AGE_S):
            return _bad(f"{field} must be 0.1 to {limits.MAX_AGE_S:.0f} seconds, got {seconds}")
    if problem := _check_cache(load) or _check_kv(load) or check_adapters(load):
        return problem
    if problem := check_draft(load) or check_memory(load) or check_image_limits(load):
        return problem
    for key, value in load.env.items():
        if not key or "=" in key or "\0" in key or "\0" in value:
            return _bad(f"env has a key or value that no environment can hold: {key[:60]!r}")
    return None


def _check_kv(load: Load) -> Problem | None:
    if load.kv_bits is not None and load.kv_bits not in KV_BITS:
        return _bad(f"kv_bits must be one of {', '.join(map(str, KV_BITS))}, got {load.kv_bits}")
    if load.kv_group_size not in KV_GROUPS:
        return _bad(f"kv_group_size must be one of {', '.join(map(str, KV_GROUPS))}, got {load.kv_group_size}")
    if load.kv_bits is not None and load.max_kv_size is not None:
        return _bad("kv_bits and max_kv_size cannot be used together: mlx-lm cannot quantise a cache of bounded size")
    return None


def _check_cache(load: Load) -> Problem | None:
    if load.cache_disk_bytes and (load.cache_entries == 0 or load.cache_bytes == 0):
        return _bad("cache_disk_bytes needs a cache in memory: set neither cache_entries nor cache_bytes to 0")
    if load.cache_dir is None:
        return None
    if not load.cache_disk_bytes:
        return _bad("cache_dir is of no use without cache_disk_bytes")
    if not 1 <= len(load.cache_dir) <= limits.MAX_PATH_CHARS or "\0" in load.cache_dir:
        return _bad(
            f"cache_dir must be a path of 1 to {limits.MAX_PATH_CHARS} characters without NUL, "
            f"got {len(load.cache_dir)} characters"
        )
    return None


def check_generate(request: Generate, *, resumed: bool = False) -> Problem | None:
    """Everything about a `Generate` that can be refused without its model.

    Args:
        request: as decoded; types are the decoder's business and are not looked at again.
        resumed: made by the orchestrator, which alone may set `resume_*`.
    """
    return (
        check_name(request.model)
        or _check_input(request)
        or _check_continued(request)
        or _check_numbers(request)
        or _check_stop(request)
        or _check_bias(request)
        or check_logprobs(request)
        or check_format(request.response_format)
        or _check_resume(request, resumed)
        or _check_tenant(request)
        or check_adapter(request)
        or check_images(request)
    )


def _check_input(request: Generate) -> Problem | None:
    given = [name for name in ("prompt", "tokens", "messages") if getattr(request, name) is not None]
    if len(given) != 1:
        return _bad(f"give exactly one of prompt, tokens, messages; got {' and '.join(given) or 'none'}")
    if request.prompt is not None and is_blank(request.prompt):
        return _bad("prompt is empty or blank")
    if request.tokens is not None and (problem := _check_ids(request.tokens)):
        return problem
    if request.messages is not None:
        return _check_messages(request.messages) or _check_template_args(request.template_args or {})
    if request.tools:
        return _bad("tools need messages, not prompt or tokens")
    if request.template_args:
        return _bad("template_args need messages, not prompt or tokens")
    return None


def _check_continued(request: Generate) -> Problem | None:
    if not request.continue_final:
        return None
    if not request.messages:
        return _bad("continue_final needs messages, not prompt or tokens")
    if request.response_format is not None:
        return _bad("continue_final cannot be had with response_format: the form is that of a whole answer")
    where, last = f"messages[{len(request.messages) - 1}]", request.messages[-1]
    if last.role != "assistant":
        return _bad(f"continue_final goes on with the assistant's words, but {where}.role is {last.role}")
    if last.tool_calls:
        return _bad(f"continue_final goes on with text, but {where} has tool_calls")
    if not _has_content(last):
        return _bad(f"continue_final goes on with text, but {where} has none")
    return None


def _check_ids(tokens: list[int]) -> Problem | None:
    if not tokens:
        return _bad("tokens is empty")
    if len(tokens) > limits.MAX_PROMPT_TOKENS:
        return Problem(ErrorCode.TOO_LARGE, f"tokens holds at most {limits.MAX_PROMPT_TOKENS} ids, got {len(tokens)}")
    for token in (min(tokens), max(tokens)):
        if not 0 <= token <= limits.MAX_TOKENS:
            return _bad(f"tokens must be ids of 0 to {limits.MAX_TOKENS}, got {token}")
    return None


def _check_messages(messages: list[ChatMessage]) -> Problem | None:
    if not messages:
        return _bad("messages is empty")
    if len(messages) > limits.MAX_MESSAGES:
        return _bad(f"at most {limits.MAX_MESSAGES} messages, got {len(messages)}")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in ROLES:
            return _bad(f"{where}.role must be one of {', '.join(ROLES)}, got {message.role[:60]!r}")
        if message.content is None and not message.tool_calls:
            return _bad(f"{where}.content is null; only an assistant message with tool_calls may have none")
        if message.tool_calls and message.role != "assistant":
            return _bad(f"{where}.tool_calls is only for the assistant, not for {message.role}")
        if isinstance(message.content, list):
            for number, part in enumerate(message.content):
                if problem := _check_part(part, f"{where}.content[{number}]"):
                    return problem
    if not any(_has_content(message) for message in messages):
        return _bad("messages hold no text and no image, only blanks")
    return None


def _check_template_args(arguments: dict[str, Any]) -> Problem | None:
    for name in arguments:
        if not name.isidentifier():
            return _bad(f"template_args has {name[:60]!r}, which cannot be the name of a template's variable")
        if name in RESERVED_TEMPLATE_ARGS:
            return _bad(f"template_args must not have {name}: it is not a variable of templates but steers rendering")
    return None


def _check_part(part: Part, where: str) -> Problem | None:
    if part.type == "text":
        return _bad(f"{where}.text is missing") if part.text is None else None
    if part.type == "image":
        return check_image(part, where)
    return _bad(f"{where}.type must be text or image, got {part.type[:60]!r}")


def _has_content(message: ChatMessage) -> bool:
    content = message.content
    if isinstance(content, str):
        return not is_blank(content) or bool(message.tool_calls)
    if content is None:
        return bool(message.tool_calls)
    return any(part.type == "image" or not is_blank(part.text or "") for part in content)


def _check_numbers(request: Generate) -> Problem | None:
    if request.max_tokens is not None and not 1 <= request.max_tokens <= limits.MAX_TOKENS:
        return _bad(f"max_tokens must be 1 to {limits.MAX_TOKENS}, or null for the default, got {request.max_tokens}")
    if request.seed is not None and not 0 <= request.seed <= limits.MAX_SEED:
        return _bad(f"seed must be 0 to {limits.MAX_SEED}, or null for fresh randomness, got {request.seed}")
    for field, count, most in (
        ("top_k", request.top_k, limits.MAX_TOKENS),
        ("repetition_window", request.repetition_window, limits.MAX_REPETITION_WINDOW),
    ):
        if not 0 <= count <= most:
            return _bad(f"{field} must be 0 to {most}, got {count}")
    if not 1 <= request.stream_interval <= limits.MAX_STREAM_INTERVAL:
        return _bad(
            f"stream_interval must be 1 to {limits.MAX_STREAM_INTERVAL} tokens, got {request.stream_interval}"
        )
    penalty = limits.MAX_PENALTY
    for field, value, low, high in (
        ("temperature", request.temperature, 0.0, limits.MAX_TEMPERATURE),
        ("min_p", request.min_p, 0.0, 1.0),
        ("repetition_penalty", request.repetition_penalty, limits.MIN_REPETITION_PENALTY, penalty),
        ("xtc_probability", request.xtc_probability, 0.0, 1.0),
        ("presence_penalty", request.presence_penalty, -penalty, penalty),
        ("frequency_penalty", request.frequency_penalty, -penalty, penalty),
    ):
        if value is not None and not low <= value <= high:  # false for NaN too
            return _bad(f"{field} must be {low:g} to {high:g}, got {value}")
    for field, value, high in (
        ("top_p", request.top_p, 1.0),
        ("xtc_threshold", request.xtc_threshold, limits.MAX_XTC_THRESHOLD),
        ("deadline_s", request.deadline_s, limits.MAX_DEADLINE_S),
    ):
        if value is not None and not 0.0 < value <= high:
            return _bad(f"{field} must be over 0 and at most {high:g}, got {value}")
    return None


def _check_stop(request: Generate) -> Problem | None:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stop) > limits.MAX_STOP_STRINGS:
        return _bad(f"stop holds at most {limits.MAX_STOP_STRINGS} strings, got {len(stop)}")
    for index, text in enumerate(stop):
        if not 1 <= len(text) <= limits.MAX_STOP_CHARS:
            return _bad(f"stop[{index}] must be 1 to {limits.MAX_STOP_CHARS} characters, got {len(text)}")
    return None


def _check_bias(request: Generate) -> Problem | None:
    bias = request.logit_bias or {}
    if len(bias) > limits.MAX_LOGIT_BIAS:
        return _bad(f"logit_bias holds at most {limits.MAX_LOGIT_BIAS} tokens, got {len(bias)}")
    for token, value in bias.items():
        if not 0 <= token <= limits.MAX_TOKENS:
            return _bad(f"logit_bias must have token ids of 0 to {limits.MAX_TOKENS}, got {token}")
        if not -limits.MAX_BIAS <= value <= limits.MAX_BIAS:  # false for NaN too
            high = limits.MAX_BIAS
            return _bad(f"logit_bias of token {token} must be {-high:g} to {high:g}, got {value}")
    return None


def _check_resume(request: Generate, resumed: bool) -> Problem | None:
    given = (
        bool(request.resume_tokens),
        request.resume_chars,
        request.resume_seq,
        request.resume_reasoning_chars,
        request.resume_tool_chars,
    )
    if not resumed and any(given):
        return _bad("fields whose names begin with resume_ are set by the orchestrator only")
    return None


def _check_tenant(request: Generate) -> Problem | None:
    if len(request.tenant) > limits.MAX_NAME_CHARS:
        return _bad(f"tenant has at most {limits.MAX_NAME_CHARS} characters, got {len(request.tenant)}")
    return None
