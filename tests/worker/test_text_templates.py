"""Owns the checks of rendering: templates that refuse, lack or need something, and the plain prompt."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
from mlx_bulkhead.protocol.checks import RESERVED_TEMPLATE_ARGS, check, is_blank
from mlx_bulkhead.protocol.commands import Generate
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.values import ChatMessage, Part
from mlx_bulkhead.worker.engines.base import Refused
from mlx_bulkhead.worker.text import templates

from .test_engine import library, open_tiny, shared_engine


class Fake:
    """A tokenizer as far as rendering needs one; `answer` may raise."""

    has_chat_template = True
    chat_template = "developer tools"

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.calls: list[dict[str, Any]] = []

    def apply_chat_template(self, turns: list[dict[str, Any]], **arguments: Any) -> Any:
        del arguments["tokenize"], arguments["add_generation_prompt"]
        self.calls.append(arguments)
        return self._answer(turns, arguments)


def say(role: str, content: Any, **more: Any) -> ChatMessage:
    return ChatMessage(role=role, content=content, **more)


def test_the_model_s_template_is_used() -> None:
    tokenizer = library()[1]
    messages = [say("system", "Be brief."), say("user", "Hi")]
    text = templates.render(tokenizer, messages)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    off = templates.render(tokenizer, messages, template_args={"enable_thinking": False})
    assert off == text + "<think>\n\n</think>\n\n"
    tool = {"type": "function", "function": {"name": "now"}}
    assert '"name": "now"' in templates.render(tokenizer, messages, [tool])
    ids = templates.encode_messages(tokenizer, messages, None, None)
    assert ids == tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], add_generation_prompt=True
    )


def test_text_parts_are_joined_and_images_refused() -> None:
    tokenizer = library()[1]
    parts = [Part(type="text", text="Hi "), Part(type="text", text="there")]
    assert "Hi there<|im_end|>" in templates.render(tokenizer, [say("user", parts)])
    with pytest.raises(Refused) as refused:
        templates.render(tokenizer, [say("user", [*parts, Part(type="image", data=b"x")])])
    assert refused.value.code is ErrorCode.UNSUPPORTED
    assert "messages[0].content[2]" in refused.value.message


def test_a_developer_is_a_system_to_templates_that_do_not_know_the_role() -> None:
    assert "<|im_start|>system\nBe kind" in templates.render(
        library()[1], [say("developer", "Be kind"), say("user", "x")]
    )
    roles: list[str] = []
    fake = Fake(lambda turns, _: roles.append(turns[0]["role"]) or "text")
    templates.render(fake, [say("developer", "x")])
    assert roles == ["developer"]


def test_without_a_template_the_roles_are_written_out() -> None:
    class Bare:
        has_chat_template = False
        chat_template = None

    text = templates.render(Bare(), [say("user", "Hi"), say("assistant", "Yes?"), say("user", "No")])
    assert text == "user: Hi\nassistant: Yes?\nuser: No\nassistant:"
    with pytest.raises(Refused, match="tools"):
        templates.render(Bare(), [say("user", "Hi")], [{"name": "x"}])


class Python(Fake):
    """A renderer that takes no arguments but those it names."""

    def apply_chat_template(  # type: ignore[override]
        self,
        turns: Any,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        colour: str = "",
        enable_thinking: bool = True,
    ) -> str:
        return f"{turns[0]['content']} {colour} {enable_thinking}"


def test_a_renderer_in_python_gets_what_it_takes_and_the_rest_is_refused_by_name() -> None:
    python, chat = Python(None), [say("user", "x")]
    assert templates.render(python, chat, None, {"colour": "red", "enable_thinking": False}) == "x red False"
    # Templates ignore these, if they do not know them; so does it.
    assert templates.render(python, chat, None, {"reasoning_effort": "low", "preserve_thinking": True}) == "x  True"
    with pytest.raises(Refused, match="takes no template_args size") as refused:
        templates.render(python, chat, None, {"colour": "red", "size": 1})
    assert refused.value.code is ErrorCode.BAD_REQUEST
    with pytest.raises(Refused, match="takes no tools") as refused:
        templates.render(python, chat, [{"name": "t"}])
    assert refused.value.code is ErrorCode.UNSUPPORTED


def test_mlx_lm_s_own_renderers_are_asked_before_the_tokenizer_s() -> None:
    class Wrapped(Fake):
        _thinking_kwarg = "thinking"

        def _chat_template(self, messages: Any, add_generation_prompt: bool, thinking: bool = True) -> str:
            return ""

    fake = Wrapped(lambda turns, arguments: str(arguments))
    assert (
        templates.render(fake, [say("user", "x")], None, {"enable_thinking": False}) == "{'enable_thinking': False}"
    )
    with pytest.raises(Refused, match="takes no template_args colour"):
        templates.render(fake, [say("user", "x")], None, {"colour": "red"})


def test_a_type_error_within_a_template_does_not_ask_for_less() -> None:
    engine = open_tiny(
        chat_template="{% for t in tools or [] %}{{ t.name + 1 }}{% endfor %}{{ messages[0].content }}"
    )
    engine.prepare(b"1", Generate(model="tiny", messages=[say("user", "x")]))
    for more in ({}, {"template_args": {"enable_thinking": True}}):
        with pytest.raises(Refused, match=r"refuses these messages.*str") as refused:
            engine.prepare(b"2", Generate(model="tiny", messages=[say("user", "x")], tools=[{"name": "get"}], **more))
        assert refused.value.code is ErrorCode.BAD_REQUEST
    engine.close()


def test_what_steers_the_rendering_is_never_taken_from_a_request() -> None:
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    steering = {
        name
        for call in (
            PreTrainedTokenizerBase.apply_chat_template,
            TokenizerWrapper.apply_chat_template,
            render_jinja_template,
        )
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    assert steering <= RESERVED_TEMPLATE_ARGS
    for name in RESERVED_TEMPLATE_ARGS:
        problem = check(Generate(model="tiny", messages=[say("user", "x")], template_args={"ok": 1, name: True}))
        assert problem is not None
        assert problem.code is ErrorCode.BAD_REQUEST
        assert f"must not have {name}:" in problem.message


@pytest.mark.parametrize("name", ["", "a b", "1a", "a-b", "a.b", "x" * 100 + "!"])
def test_template_args_have_names_that_a_template_can_say(name: str) -> None:
    problem = check(Generate(model="tiny", messages=[say("user", "x")], template_args={name: 1}))
    assert problem is not None
    assert problem.code is ErrorCode.BAD_REQUEST
    assert repr(name[:60]) in problem.message


@pytest.mark.parametrize(
    "text", ["", " \n", "\u200b", "\u2060\ufeff\u00ad", "\u2028\u2029\u00a0", "\x00\x7f", " " * 100 + "\u200d"]
)
def test_what_cannot_be_seen_is_blank(text: str) -> None:
    assert is_blank(text)
    assert not is_blank(text + "x")
    assert not is_blank(text + "\U0001f600")
    part = say("user", [Part(type="text", text=text)])
    for request in (
        Generate(model="tiny", prompt=text),
        Generate(model="tiny", messages=[say("user", text)]),
        Generate(model="tiny", messages=[part]),
    ):
        problem = check(request)
        assert problem is not None
        assert problem.code is ErrorCode.BAD_REQUEST
        assert "blank" in problem.message


@pytest.mark.parametrize("error", [TypeError("no"), ValueError("roles must alternate"), RuntimeError("x")])
def test_a_template_that_fails_refuses_the_request(error: Exception) -> None:
    def fail(turns: Any, arguments: Any) -> str:
        raise error

    with pytest.raises(Refused) as refused:
        templates.render(Fake(fail), [say("user", "x")])
    assert refused.value.code is ErrorCode.BAD_REQUEST
    assert str(error) in refused.value.message


CALLS = [
    {"id": "1", "function": {"name": "a", "arguments": '{"x": 1}'}},
    {"id": "2", "function": {"name": "b", "arguments": "{}"}},
]
TOOL_CHAT = [
    say("user", "go"),
    say("assistant", None, tool_calls=CALLS),
    say("tool", "one", tool_call_id="1"),
    say("tool", "two", tool_call_id="2"),
    say("user", "and?"),
]


def test_tool_arguments_become_objects_and_parallel_calls_single_ones_only_if_they_must() -> None:
    seen: list[list[dict[str, Any]]] = []

    def picky(turns: list[dict[str, Any]], arguments: Any) -> str:
        seen.append(turns)
        for turn in turns:
            calls = turn.get("tool_calls") or []
            if len(calls) > 1 or any(isinstance(call["function"]["arguments"], str) for call in calls):
                raise ValueError("one call a turn, with an object")
        return "done"

    before = copy.deepcopy(TOOL_CHAT)
    assert templates.render(Fake(picky), TOOL_CHAT) == "done"
    assert before == TOOL_CHAT
    original, parsed, split = seen
    assert original[1]["tool_calls"] == CALLS
    assert parsed[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert [turn["role"] for turn in split] == ["user", "assistant", "tool", "assistant", "tool", "user"]
    assert [turn.get("tool_call_id") for turn in split][2::2] == ["1", "2"]


def test_a_template_cannot_change_the_caller_s_messages() -> None:
    def change(turns: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        turns[1]["tool_calls"].clear()
        tools = arguments.get("tools", [])
        text = f"{len(tools)} tools"
        tools.clear()
        return text

    before, tools = copy.deepcopy(TOOL_CHAT), [{"name": "t"}]
    templates.render(Fake(change), TOOL_CHAT, tools)
    assert before == TOOL_CHAT
    assert tools == [{"name": "t"}]


@pytest.mark.parametrize(
    ("source", "style"),
    [
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", "chatml"),
        ("<|start_header_id|>{{ messages[0].content }}<|end_header_id|>", "llama3"),
        ("[INST]{{ messages[0].content }}[/INST]", "mistral"),
        ("Q: {{ messages[0].content }}", "custom"),
    ],
)
def test_a_template_of_the_load_replaces_the_checkpoint_s(source: str, style: str) -> None:
    engine = open_tiny(chat_template=source)
    assert engine.info.template.format == style
    assert engine.info.template.overridden
    assert engine.info.template.has_template
    prepared = engine.prepare(b"1", Generate(model="tiny", messages=[say("user", "tide")]))
    assert library()[1].decode(prepared.row.prompt) == source.replace("{{ messages[0].content }}", "tide").replace(
        "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", "<|im_start|>tide"
    )
    engine.close()


def test_what_the_tiny_model_s_template_is() -> None:
    info = shared_engine().info.template
    assert (info.has_template, info.format, info.overridden, info.thinking, info.tools) == (
        True,
        "chatml",
        False,
        True,
        True,
    )


class Bos:
    """Adds `<s>` in front when asked to."""

    def __init__(self, bos: str | None) -> None:
        self.bos_token = bos

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [5] * len(text)


def test_special_tokens_are_added_to_a_plain_prompt_once() -> None:
    assert templates.encode_prompt(Bos("<s>"), "ab") == [1, 5, 5]
    assert templates.encode_prompt(Bos("<s>"), "<s>") == [5, 5, 5]
    assert templates.encode_prompt(Bos(None), "a") == [1, 5]


def test_a_request_in_full() -> None:
    engine = shared_engine()
    request = Generate(model="tiny", messages=[say("user", "Hi")], stop="x", temperature=0.5, seed=9, max_tokens=7)
    row = engine.prepare(b"1", request).row
    assert (row.max_tokens, row.sampling.temperature, row.sampling.seed, row.emitted) == (7, 0.5, 9, [])
    assert library()[1].decode(row.prompt).endswith("<|im_start|>assistant\n")
    default = engine.prepare(b"2", Generate(model="tiny", prompt="Hi")).row
    assert (default.max_tokens, default.sampling.temperature) == (512, 0.0)
    seeds = {engine.prepare(b"3", Generate(model="tiny", prompt="Hi")).row.sampling.seed for _ in range(4)}
    assert len(seeds) == 4
    assert min(seeds) >= 0
