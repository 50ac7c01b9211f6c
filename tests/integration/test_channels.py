"""Reasoning and tool calls through the whole chain, and across the death of a worker.

A form of answer makes a random network write what is to be split.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.protocol.values import ToolCall

from tests.integration.conftest import Daemon

BODY = '\n{"name": "weather", "arguments": {"city": "Brno", "days": 3}}\n'
CALL = f"<tool_call>{BODY}</tool_call>"
REASONING = "Rain or not? " * 12
ANSWER = f"<think>\n{REASONING}</think>\n\nI will look. {CALL}"
GRAMMAR = (
    f"start: <think> {json.dumps(chr(10) + REASONING)} </think> {json.dumps(chr(10) * 2 + 'I will look. ')} "
    f"<tool_call> {json.dumps(BODY)} </tool_call>"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": TOOLS,
    "template_args": {"enable_thinking": False},
    "max_tokens": 600,
    "response_format": {"type": "grammar", "grammar": GRAMMAR},
}


def test_an_answer_in_three_channels(daemon: Daemon) -> None:
    with daemon.client() as client:
        stream = client.generate("tiny", **ASK)
        news = [(snap.new_reasoning, snap.new_text, snap.new_tool_text) for snap in stream]
        result = stream.result()
        raw = client.complete("tiny", **ASK, channels=False)
        prompt = {**ASK, "messages": None, "tools": None, "template_args": None, "prompt": "Weather?"}
        plain = client.complete("tiny", **prompt)
    assert [json.loads(call.arguments) for call in result.tool_calls] == [{"city": "Brno", "days": 3}]
    assert (result.reasoning, result.text, result.tool_text) == (REASONING, "I will look. ", CALL)
    assert result.finish_reason == "tool_calls"
    assert result.tool_error == ""
    assert tuple(map("".join, zip(*news, strict=True))) == (result.reasoning, result.text, result.tool_text)
    assert (raw.text, raw.reasoning, raw.tool_calls, raw.finish_reason) == (ANSWER, "", [], "stop")
    assert (plain.text, plain.tool_calls) == (ANSWER, [])
    assert raw.tokens == result.tokens


def test_without_tools_a_call_is_content(daemon: Daemon) -> None:
    with daemon.client() as client:
        result = client.complete("tiny", **{**ASK, "tools": None})
    assert (result.text, result.tool_calls) == (f"I will look. {CALL}", [])


def test_stop_strings_are_those_of_the_content(daemon: Daemon) -> None:
    with daemon.client() as client:
        result = client.complete("tiny", **ASK, stop=["Rain", "look"])
    assert (result.reasoning, result.text) == (REASONING, "I will ")
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("channel", ["new_reasoning", "new_text", "new_tool_text"])
def test_no_character_is_lost_when_the_worker_dies(own_daemon: Daemon, tiny_model: Path, channel: str) -> None:
    with own_daemon.client() as client:
        client.load("tiny", tiny_model)
        stream = client.generate("tiny", **ASK)
        killed = False
        for snap in stream:
            if not killed and getattr(snap, channel):
                pid = next(model.pid for model in client.models() if model.name == "tiny")
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                killed = True
        result = stream.result()
    assert killed
    assert (result.reasoning, result.text, result.tool_text) == (REASONING, "I will look. ", CALL)
    assert [call.name for call in result.tool_calls] == ["weather"]
    assert isinstance(result.tool_calls[0], ToolCall)


OTHER_FORMS = {
    "unknown marks": ("<function=weather> <city> Brno </city> </function>", 0),
    "known marks around an unknown form": ("<tool_call>weather(city=Brno)</tool_call>", 1),
    "two calls, the second in an unknown form": (f"{CALL}\n<tool_call>weather(Brno)</tool_call>", 1),
}


@pytest.mark.parametrize("name", list(OTHER_FORMS))
def test_a_call_in_an_unknown_form_is_shown_as_it_was_written(daemon: Daemon, name: str) -> None:
    """Field report N04."""
    written, marked = OTHER_FORMS[name]
    pieces = re.split("(</?tool_call>)", f"I will look. {written}")
    grammar = "start: " + " ".join(p if p.endswith("tool_call>") else json.dumps(p) for p in pieces if p)
    with daemon.client() as client:
        result = client.complete("tiny", **{**ASK, "response_format": {"type": "grammar", "grammar": grammar}})
    if not marked:
        assert (result.text, result.tool_text, result.tool_error) == (f"I will look. {written}", "", "")
    else:
        assert result.text.strip() == "I will look."
        assert result.tool_text.replace("\n", "") == written.replace("\n", "")
        assert f"call {written.count('<tool_call>')} could not be parsed" in result.tool_error
    assert len(result.tool_calls) == written.count(CALL)
