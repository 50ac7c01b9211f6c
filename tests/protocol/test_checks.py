"""Each bad input is refused with the field, the value and the range; each good one at the edge is taken."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from mlx_bulkhead.protocol import codec, limits
from mlx_bulkhead.protocol.checks import check, check_generate, check_load, check_name
from mlx_bulkhead.protocol.codec import KINDS, Message
from mlx_bulkhead.protocol.commands import (
    AddAdapter,
    Attach,
    Cancel,
    Command,
    DropAdapter,
    Generate,
    Load,
    Models,
    Restart,
    Shutdown,
    Stats,
    Unload,
)
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.values import ChatMessage, Part, ResponseFormat

from .strategies import messages

MAX = 2**31 - 1
NAN, INF = math.nan, math.inf


def generate(**fields: Any) -> Generate:
    """A request with an input, unless the fields give one."""
    if not {"prompt", "tokens", "messages"} & set(fields):
        fields["prompt"] = "Hello"
    return Generate(**{"model": "tiny", **fields})


def chat(*turns: ChatMessage) -> Generate:
    return generate(messages=list(turns))


def user(content: Any) -> ChatMessage:
    return ChatMessage(role="user", content=content)


BAD_NUMBERS: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, f"1 to {MAX}"),
    ("max_tokens", -1, f"1 to {MAX}"),
    ("max_tokens", 2**40, f"1 to {MAX}"),
    ("temperature", NAN, "0 to 100"),
    ("temperature", INF, "0 to 100"),
    ("temperature", -INF, "0 to 100"),
    ("temperature", -1.0, "0 to 100"),
    ("temperature", 100.5, "0 to 100"),
    ("top_p", NAN, "over 0 and at most 1"),
    ("top_p", 0.0, "over 0 and at most 1"),
    ("top_p", 1.5, "over 0 and at most 1"),
    ("top_p", -0.1, "over 0 and at most 1"),
    ("top_k", -1, f"0 to {MAX}"),
    ("top_k", 2**31, f"0 to {MAX}"),
    ("xtc_probability", 1.5, "0 to 1"),
    ("xtc_probability", NAN, "0 to 1"),
    ("xtc_threshold", 0.0, "over 0 and at most 0.5"),
    ("xtc_threshold", 0.75, "over 0 and at most 0.5"),
    ("xtc_threshold", NAN, "over 0 and at most 0.5"),
    ("top_logprobs", -1, "0 to 20"),
    ("top_logprobs", 21, "0 to 20"),
    ("min_p", 2.0, "0 to 1"),
    ("min_p", -0.5, "0 to 1"),
    ("min_p", NAN, "0 to 1"),
    ("seed", -1, f"0 to {2**63 - 1}"),
    ("seed", 2**63, f"0 to {2**63 - 1}"),
    ("seed", 2**70, f"0 to {2**63 - 1}"),
    ("repetition_penalty", 0.0, "0.01 to 100"),
    ("repetition_penalty", -1.0, "0.01 to 100"),
    ("repetition_penalty", NAN, "0.01 to 100"),
    ("repetition_penalty", INF, "0.01 to 100"),
    ("repetition_penalty", 1e-38, "0.01 to 100"),
    ("repetition_window", -1, "0 to 65536"),
    ("repetition_window", 65537, "0 to 65536"),
    ("presence_penalty", NAN, "-100 to 100"),
    ("presence_penalty", 101.0, "-100 to 100"),
    ("frequency_penalty", -INF, "-100 to 100"),
    ("stream_interval", 0, "1 to 4096"),
    ("stream_interval", 5000, "1 to 4096"),
    ("deadline_s", 0.0, "over 0 and at most 604800"),
    ("deadline_s", -5.0, "over 0 and at most 604800"),
    ("deadline_s", NAN, "over 0 and at most 604800"),
    ("deadline_s", 1e9, "over 0 and at most 604800"),
]


@pytest.mark.parametrize(("field", "value", "span"), BAD_NUMBERS)
def test_a_number_out_of_range(field: str, value: Any, span: str) -> None:
    problem = check_generate(generate(**{field: value}))
    assert problem is not None
    assert problem.code is ErrorCode.BAD_REQUEST
    assert problem.message.startswith(f"{field} must be {span}")
    assert problem.message.endswith(f"got {value}")


GOOD_FIELDS: list[tuple[str, Any]] = [
    ("max_tokens", 1),
    ("max_tokens", MAX),
    ("max_tokens", None),
    ("temperature", 0.0),
    ("temperature", 100.0),
    ("temperature", None),
    ("top_p", 1.0),
    ("top_p", 1e-9),
    ("top_k", 0),
    ("top_k", 1_000_000),
    ("min_p", 0.0),
    ("min_p", 1.0),
    ("xtc_probability", 1.0),
    ("xtc_threshold", 0.5),
    ("logprobs", True),
    ("response_format", ResponseFormat("json_object")),
    ("response_format", ResponseFormat("json_schema", schema={})),
    ("response_format", ResponseFormat("regex", pattern="a")),
    ("response_format", ResponseFormat("choice", choices=["a"])),
    ("response_format", ResponseFormat("grammar", grammar='start: "a"')),
    ("seed", 0),
    ("seed", 2**63 - 1),
    ("repetition_penalty", 1.0),
    ("repetition_window", 0),
    ("presence_penalty", -2.0),
    ("frequency_penalty", 2.0),
    ("stream_interval", 4096),
    ("deadline_s", 0.001),
    ("stop", None),
    ("stop", []),
    ("stop", "\n"),
    ("stop", ["x" * 1024] * 64),
    ("logit_bias", {}),
    ("logit_bias", {0: -1000.0, MAX: 1000.0}),
    ("prompt", " x "),
    ("prompt", "a\x00"),
    ("tokens", [0, MAX]),
    ("template_args", {}),
]


@pytest.mark.parametrize(("field", "value"), GOOD_FIELDS)
def test_the_edges_of_the_ranges_are_taken(field: str, value: Any) -> None:
    assert check_generate(generate(**{field: value})) is None


BAD_INPUTS: dict[str, tuple[Generate, str]] = {
    "no input": (Generate(model="tiny"), "exactly one of prompt, tokens, messages; got none"),
    "two inputs": (generate(prompt="x", tokens=[1]), "got prompt and tokens"),
    "three inputs": (
        generate(prompt="x", tokens=[1], messages=[user("x")]),
        "prompt and tokens and messages",
    ),
    "empty prompt": (generate(prompt=""), "prompt is empty or blank"),
    "blank prompt": (generate(prompt=" \n\t\u3000"), "prompt is empty or blank"),
    "empty tokens": (generate(tokens=[]), "tokens is empty"),
    "negative token": (generate(tokens=[1, -5]), f"ids of 0 to {MAX}, got -5"),
    "token of 2**40": (generate(tokens=[1, 2**40]), f"ids of 0 to {MAX}, got {2**40}"),
    "empty messages": (chat(), "messages is empty"),
    "blank text": (chat(user("  ")), "messages hold no text and no image"),
    "blank text part": (chat(user([Part(type="text", text="\n")])), "messages hold no text"),
    "empty parts": (chat(user([])), "messages hold no text"),
    "unknown role": (
        chat(user("x"), ChatMessage(role="robot", content="x")),
        r"messages\[1\].role must be one of system, developer, user, assistant, tool, got 'robot'",
    ),
    "null content": (chat(user(None)), r"messages\[0\].content is null"),
    "tool calls of a user": (
        chat(ChatMessage(role="user", content="x", tool_calls=[{"id": "1"}])),
        r"messages\[0\].tool_calls is only for the assistant, not for user",
    ),
    "too many messages": (chat(*[user("x")] * 10_001), "at most 10000 messages, got 10001"),
    "unknown part": (
        chat(user([Part(type="audio")])),
        r"messages\[0\].content\[0\].type must be text or image",
    ),
    "text part without text": (
        chat(user([Part(type="text")])),
        r"messages\[0\].content\[0\].text is missing",
    ),
    "tools without messages": (generate(prompt="x", tools=[{"type": "function"}]), "tools need messages"),
    "template_args without messages": (generate(tokens=[1], template_args={"a": 1}), "need messages"),
    "empty stop": (generate(stop=""), r"stop\[0\] must be 1 to 1024 characters, got 0"),
    "empty stop in a list": (generate(stop=["x", ""]), r"stop\[1\] must be 1 to 1024 characters, got 0"),
    "long stop": (generate(stop="x" * 1025), r"stop\[0\] must be 1 to 1024 characters, got 1025"),
    "10000 stops": (generate(stop=["x"] * 10_000), "stop holds at most 64 strings, got 10000"),
    "negative bias id": (generate(logit_bias={-1: 0.0}), f"token ids of 0 to {MAX}, got -1"),
    "huge bias id": (generate(logit_bias={2**40: 0.0}), f"token ids of 0 to {MAX}, got {2**40}"),
    "NaN bias": (generate(logit_bias={7: NAN}), "of token 7 must be -1000 to 1000, got nan"),
    "infinite bias": (generate(logit_bias={7: INF}), "of token 7 must be -1000 to 1000, got inf"),
    "many biases": (generate(logit_bias=dict.fromkeys(range(4097), 0.0)), "at most 4096 tokens, got 4097"),
    "no model": (generate(model=""), "model must be 1 to 256 printable characters.*got 0 characters"),
    "client sets resume_tokens": (generate(resume_tokens=[1]), "set by the orchestrator only"),
    "client sets resume_chars": (generate(resume_chars=1), "set by the orchestrator only"),
    "client sets resume_seq": (generate(resume_seq=-1), "set by the orchestrator only"),
}


@pytest.mark.parametrize("name", list(BAD_INPUTS))
def test_a_bad_input(name: str) -> None:
    request, words = BAD_INPUTS[name]
    problem = check_generate(request)
    assert problem is not None
    assert problem.code is ErrorCode.BAD_REQUEST
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(problem.message)


def test_very_long_token_lists_are_too_large() -> None:
    most = limits.MAX_PROMPT_TOKENS
    assert check_generate(generate(tokens=[1] * most)) is None
    problem = check_generate(generate(tokens=[1] * (most + 1)))
    assert problem == (ErrorCode.TOO_LARGE, f"tokens holds at most {most} ids, got {most + 1}")


GOOD_CHATS = {
    "text": [user("Hi")],
    "a tool call without content": [user("x"), ChatMessage(role="assistant", tool_calls=[{"id": "1"}])],
    "an empty answer among others": [user("x"), ChatMessage(role="assistant", content=""), user("y")],
    "an image alone": [user([Part(type="image", data=b"x")])],
    "every role": [
        ChatMessage(role=role, content="x") for role in ("system", "developer", "user", "assistant", "tool")
    ],
}


@pytest.mark.parametrize("name", list(GOOD_CHATS))
def test_a_good_chat(name: str) -> None:
    assert check_generate(chat(*GOOD_CHATS[name])) is None


def test_the_orchestrator_may_resume() -> None:
    request = generate(resume_tokens=[1, 2], resume_chars=5, resume_seq=2)
    assert check_generate(request, resumed=True) is None


@pytest.mark.parametrize("name", ["a", "x" * 200, "x" * 256, "org/model-1.5:4bit", "模型", "two words", "é🐈"])
def test_good_names(name: str) -> None:
    assert check_name(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x" * 257,
        "x" * 300,
        " x",
        "x ",
        "a\nb",
        "a\tb",
        "a\0b",
        "\x1b[31m",
        "\x7f",
        "\u202e",
        "\u2028",
        "a\ud800",
    ],
)
def test_bad_names(name: str) -> None:
    for command in (
        generate(model=name),
        Load(name=name, model="m"),
        Unload(model=name),
        Restart(model=name),
        AddAdapter(model=name, name="a", path="/a"),
        AddAdapter(model="tiny", name=name, path="/a"),
        DropAdapter(model="tiny", name=name),
    ):
        problem = check(command)
        assert problem is not None
        assert problem.code is ErrorCode.BAD_REQUEST
        assert "must be 1 to 256 printable characters" in problem.message
        assert f"got {len(name)} characters" in problem.message
        assert len(problem.message) < 400
        assert problem.message.isprintable(), "an error message is safe to print"


BAD_LOADS: list[tuple[str, Any, str]] = [
    ("model", "", "1 to 4096 characters, got 0"),
    ("model", "x" * 4097, "1 to 4096 characters, got 4097"),
    ("model", "a\0b", "NUL"),
    ("context_limit", 0, f"1 to {MAX}, got 0"),
    ("memory_limit", 1000, f"{2**20} to {2**50}, got 1000"),
    ("memory_limit", 2**60, f"{2**20} to {2**50}, got {2**60}"),
    ("max_running", 0, "1 to 1024, got 0"),
    ("max_running", 5000, "1 to 1024, got 5000"),
    ("max_queued", -1, "0 to 100000, got -1"),
    ("stall_budget_s", NAN, "0.1 to 31536000 seconds, got nan"),
    ("stall_budget_s", INF, "0.1 to 31536000 seconds, got inf"),
    ("stall_budget_s", 0.0, "0.1 to 31536000 seconds, got 0.0"),
    ("cache_entries", -1, "0 to 100000, got -1"),
    ("cache_bytes", -1, f"0 to {2**50}, got -1"),
    ("cache_disk_bytes", -5, f"0 to {2**50}, got -5"),
    ("cache_dir", "/somewhere", "of no use without cache_disk_bytes"),
    ("memory_soft", 0.0, "0.05 to 1 of the memory limit, got 0.0"),
    ("memory_soft", NAN, "0.05 to 1 of the memory limit, got nan"),
    ("memory_soft", 0.96, "not be over memory_hard, got 0.96 and 0.95"),
    ("memory_hard", 1.01, "0.05 to 1 of the memory limit, got 1.01"),
    ("memory_off", ["wait", "kill"], "takes guard, clear, drop, wait, fail, got 'kill'"),
    ("env", {"": "x"}, "no environment can hold: ''"),
    ("env", {"A=B": "x"}, "no environment can hold: 'A=B'"),
    ("env", {"A": "x\0"}, "no environment can hold: 'A'"),
]


@pytest.mark.parametrize(("field", "value", "words"), BAD_LOADS)
def test_a_bad_load(field: str, value: Any, words: str) -> None:
    problem = check_load(Load(**{"name": "tiny", "model": "/m", field: value}))
    assert problem is not None
    assert problem.code is ErrorCode.BAD_REQUEST
    assert problem.message.startswith(field)
    assert words in problem.message


def test_a_disk_cache_needs_a_folder_name_and_a_cache_in_memory() -> None:
    def problem(**fields: Any) -> str:
        found = check_load(Load("tiny", "/m", cache_disk_bytes=2**30, **fields))
        return "" if found is None else found.message

    assert problem() == problem(cache_dir="/var/cache", cache_bytes=1, cache_entries=1) == ""
    assert "cache_entries" in problem(cache_entries=0)
    assert "cache_bytes" in problem(cache_bytes=0)
    for folder in ("", "a\0b", "x" * 4097):
        assert "cache_dir must be a path of 1 to 4096" in problem(cache_dir=folder)


def test_the_name_of_a_tenant_is_bounded() -> None:
    assert check(generate(tenant="x" * 256)) is None
    problem = check(generate(tenant="x" * 257))
    assert problem is not None
    assert "tenant has at most 256 characters, got 257" in problem.message


OTHER_COMMANDS: list[tuple[Command, str | None]] = [
    (Load(name="tiny", model="/m", context_limit=1, memory_limit=2**20, max_queued=0, env={"A": "=b"}), None),
    (Cancel(), None),
    (Models(), None),
    (Stats(), None),
    (Stats(model="tiny"), None),
    (Stats(model="\n"), "model must be"),
    (Unload(model="tiny"), None),
    (Restart(model="tiny"), None),
    (AddAdapter(model="tiny", name="a", path="/a"), None),
    (AddAdapter(model="tiny", name="a", path=" "), "path must be a path of 1 to 4096 characters without NUL, got 1"),
    (AddAdapter(model="tiny", name="a", path="/a\0"), "path must be a path"),
    (AddAdapter(model="tiny", name="base", path="/a"), "name must not be 'base': that names the model without"),
    (DropAdapter(model="tiny", name="a"), None),
    (DropAdapter(model="tiny", name="base"), "name must not be 'base'"),
    (Attach(request=bytes(16)), None),
    (Attach(request=b"short"), "request must be an id of 16 bytes, got 5"),
    (Shutdown(), None),
    (Shutdown(grace_s=0), None),
    (Shutdown(grace_s=-1), "grace_s must be 0 to 86400 seconds, got -1"),
    (Shutdown(grace_s=NAN), "grace_s must be 0 to 86400 seconds, got nan"),
    (Shutdown(grace_s=INF), "grace_s must be 0 to 86400 seconds, got inf"),
]


@pytest.mark.parametrize(("command", "words"), OTHER_COMMANDS, ids=str)
def test_other_commands(command: Command, words: str | None) -> None:
    problem = check(command)
    if words is None:
        assert problem is None
    else:
        assert problem is not None
        assert words in problem.message


@given(messages)
def test_no_check_raises_on_anything_that_decodes(message: Message) -> None:
    assert type(message) in KINDS.values()
    if isinstance(message, Command):
        decoded = codec.decode(codec.encode(message)).message
        assert isinstance(decoded, Command)
        check(decoded)
