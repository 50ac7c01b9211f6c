"""Chat templates at load: tries the one that the load gives, and reads the one that it replaces."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

from .base import LoadProblem
from .reasons import short

_USER = {"role": "user", "content": "Hello"}
_SYSTEM = {"role": "system", "content": "Be brief."}
_ASSISTANT = {"role": "assistant", "content": "Hi"}
_PROBES = ([_USER], [_SYSTEM, _USER], [_USER, _ASSISTANT, _USER], [_SYSTEM, _USER, _ASSISTANT, _USER])


def probe_template(tokenizer: Any) -> None:
    """Raises `LoadProblem` if the template cannot be read, or fails on every one of a few small chats."""
    import jinja2

    first: Exception | None = None
    for turns in _PROBES:
        try:
            tokenizer.apply_chat_template([dict(t) for t in turns], tokenize=False, add_generation_prompt=True)
            return
        except jinja2.TemplateSyntaxError as error:
            raise LoadProblem(f"chat_template, line {error.lineno}: {error.message}") from error
        except Exception as error:  # templates raise whatever they like
            first = first or error
    assert first is not None
    lines = [f.lineno for f in traceback.extract_tb(first.__traceback__) if f.filename in ("<template>", "<unknown>")]
    where = f", line {lines[-1]}" if lines else ""
    raise LoadProblem(
        f"chat_template{where}: {short(first)} (it fails on each of {len(_PROBES)} small chats of system, user and "
        "assistant; the first of them is one user message)"
    ) from first


def own_template(path: Path) -> str | dict[str, str] | None:
    """The template in a checkpoint's files, or several by name. None if there is none that can be read."""
    named: dict[str, str] = {}
    try:
        config = json.loads((path / "tokenizer_config.json").read_text("utf-8")).get("chat_template")
        if isinstance(config, str):
            named["default"] = config
        elif isinstance(config, list):
            named |= {entry["name"]: entry["template"] for entry in config}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    for file in (path / "chat_template.jinja", *sorted((path / "additional_chat_templates").glob("*.jinja"))):
        try:
            named["default" if file.parent == path else file.stem] = file.read_text("utf-8")
        except (OSError, ValueError):
            continue
    return named if len(named) > 1 else named.get("default")
