"""From loose Python arguments to strict commands: every mistake is a `BadRequest` that names it."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.orchestrator.options import (
    GENERATE_OPTIONS,
    LOAD_OPTIONS,
    encode_command,
    make_generate,
    make_load,
)
from mlx_bulkhead.protocol.commands import Attach, Generate, Load, Stats, Unload
from mlx_bulkhead.protocol.errors import BadRequest, TooLarge
from mlx_bulkhead.protocol.values import ChatMessage, Part


def generate(**options: Any) -> Generate:
    return make_generate("m", options)  # pyright: ignore[reportArgumentType]


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


def test_every_field_that_callers_may_set_is_an_option() -> None:
    ours = {name for name in Generate.__struct_fields__ if name == "model" or name.startswith("resume_")}
    assert set(GENERATE_OPTIONS) == set(Generate.__struct_fields__) - ours
    assert set(LOAD_OPTIONS) == set(Load.__struct_fields__) - {"name", "model"}


def test_dicts_become_messages_and_the_callers_objects_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "text", "text": "?"}]}]
    before = copy.deepcopy(messages)
    request = generate(messages=messages)
    assert request.messages == [
        ChatMessage("user", [Part("image", path=os.path.abspath("a.png")), Part("text", "?")])
    ]
    assert messages == before
    messages[0]["role"] = "system"
    assert request.messages[0].role == "user"


def test_pictures_are_bytes_paths_or_parts() -> None:
    images = [
        b"x",
        memoryview(b"y"),
        Path("a.png"),
        {"type": "image", "url": "https://e.org/a"},
        Part("image", data=b"z"),
    ]
    request = generate(messages=user("?"), images=images)
    assert request.images == [
        Part("image", data=b"x"),
        Part("image", data=b"y"),
        Part("image", path=os.path.abspath("a.png")),
        Part("image", url="https://e.org/a"),
        Part("image", data=b"z"),
    ]
    assert images[3] == {"type": "image", "url": "https://e.org/a"}


def test_messages_may_be_structs_tuples_and_generators() -> None:
    message = ChatMessage("user", "hi")
    assert generate(messages=(message,)).messages == [message]
    assert generate(messages=(m for m in user("hi"))).messages == [message]
    assert generate(messages=[{"role": "user", "content": "hi", "refusal": None}]).messages == [message]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_token": 5}, ["'max_token'", "did you mean 'max_tokens'", "temperature"]),
        ({"resume_seq": 1}, ["unknown option 'resume_seq'"]),
        ({"max_tokens": "10"}, ["$.max_tokens", "'10'"]),
        ({"max_tokens": True}, ["$.max_tokens", "bool"]),
        ({"max_tokens": 10.0}, ["$.max_tokens", "float"]),
        ({"max_tokens": 0}, ["max_tokens", "got 0"]),
        ({"top_p": None}, ["$.top_p", "None"]),
        ({"stop": 5}, ["$.stop", "got 5"]),
        ({"stop": [""]}, ["stop[0]"]),
        ({"seed": 2**70}, ["seed", str(2**70)[:10]]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"temperature": float("nan")}, ["temperature", "nan"]),
        ({"logit_bias": {"5": 1.0}}, ["logit_bias", "'5'"]),
        ({"on_crash": "die"}, ["$.on_crash", "'die'"]),
        ({"prompt": "\ud800"}, ["prompt", "surrogate"]),
        ({"prompt": object()}, ["prompt", "object"]),
        ({"prompt": " "}, ["prompt is empty"]),
        ({"prompt": None}, ["exactly one of prompt, tokens, messages"]),
        ({"prompt": None, "tokens": [-1]}, ["tokens", "-1"]),
        ({"prompt": None, "messages": "hi"}, ["$.messages", "'hi'"]),
        ({"prompt": None, "messages": []}, ["messages is empty"]),
        ({"prompt": None, "messages": [5]}, ["$.messages[0]"]),
        ({"prompt": None, "messages": [{"role": 5, "content": "a"}]}, ["$.messages[0].role"]),
        ({"prompt": None, "messages": [{"role": "user", "contnt": "a"}]}, ["'contnt'", "'content'"]),
        ({"prompt": None, "messages": user("\udfff")}, ["messages", "surrogate"]),
        ({"prompt": None, "messages": user("?"), "images": ["a.png"]}, ["$.images[0]", "'a.png'"]),
        ({"prompt": None, "messages": user("?"), "images": [{"type": "text", "text": "x"}]}, ["images[0].type"]),
        ({"images": [b"x"]}, ["images need messages"]),
        ({"prompt": None, "messages": user(["a"])}, ["$.messages[0].content[0]"]),
        (
            {"prompt": None, "messages": user([{"type": "image_url", "image_url": {"url": "x"}}])},
            ["messages[0].content[0]", "image_url", '"image"'],
        ),
        ({"prompt": None, "messages": user([{"type": "image", "data": "xx"}])}, ["content[0].data", "bytes"]),
        ({"response_format": "json"}, ["$.response_format", "'json'"]),
        ({"response_format": {}}, ["$.response_format", "type"]),
        ({"response_format": {"type": "regex", "patern": "a"}}, ["response_format", "'patern'", "'pattern'"]),
        ({"response_format": {"type": "xml"}}, ["response_format.type", "'xml'"]),
        ({"response_format": {"type": "choice", "choices": "yes"}}, ["$.response_format.choices"]),
        ({"top_logprobs": 2}, ["top_logprobs", "logprobs"]),
        ({"continue_final": True}, ["continue_final", "messages"]),
        ({"xtc_threshold": 0.6}, ["xtc_threshold", "0.5", "0.6"]),
    ],
)
def test_a_mistake_is_a_bad_request_that_names_it(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(BadRequest) as caught:
        generate(**{"prompt": "hi", **options})
    for word in words:
        assert word in caught.value.message
    assert len(caught.value.message) < 1000


def test_what_contains_itself_or_is_too_large_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(BadRequest):
        generate(messages=user("a"), tools=loop)
    with pytest.raises(TooLarge, match="prompt"):
        generate(prompt="x" * (65 * 1024 * 1024))


def test_a_local_model_becomes_absolute_and_a_hub_id_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "there").mkdir(parents=True)
    assert make_load("a", "org/there", {}).model == str(tmp_path / "org/there")
    assert make_load("a", "org/elsewhere", {}).model == "org/elsewhere"
    assert make_load("a", "./new", {}).model == str(tmp_path / "new")
    assert make_load("a", Path("new"), {}).model == str(tmp_path / "new")


@pytest.mark.parametrize(
    ("name", "model", "options", "word"),
    [
        ("", "x", {}, "name"),
        ("a", "", {}, "model"),
        ("a", 5, {}, "$.model"),
        ("a", "x\ud800", {}, "surrogate"),
        ("a", "x\0", {}, "NUL"),
        ("a", "x", {"env": {"A": 5}}, "$.env"),
        ("a", "x", {"env": {"A\0": "5"}}, "env"),
        ("a", "x", {"memory_limit": 5}, "memory_limit"),
        ("a", "x", {"context": 5}, "'context_limit'"),
    ],
)
def test_bad_loads(name: str, model: Any, options: Any, word: str) -> None:
    with pytest.raises(BadRequest) as caught:
        make_load(name, model, options)
    assert word in caught.value.message


@pytest.mark.parametrize(
    "command",
    [Unload(""), Unload(5), Stats("\ud800"), Attach(b"short")],  # pyright: ignore[reportArgumentType]
)
def test_other_commands_are_checked_too(command: Any) -> None:
    with pytest.raises(BadRequest):
        encode_command(command)
