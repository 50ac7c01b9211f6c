"""Owns the checks of templates that drop tools, of messages that are continued, and of templates tried at load."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from mlx_bulkhead.protocol.checks import check
from mlx_bulkhead.protocol.commands import Generate
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.values import ChatMessage, Part, ResponseFormat
from mlx_bulkhead.worker.engines.base import LoadProblem, Refused
from mlx_bulkhead.worker.engines.template_files import own_template
from mlx_bulkhead.worker.text import templates

from .test_engine import library, model_directory, open_tiny

TOOL = {"type": "function", "function": {"name": "now"}}
CHAT = [ChatMessage(role="user", content="Tell me"), ChatMessage(role="assistant", content="Once upon")]


class Named:
    """A tokenizer that has templates by name, of which `shown` shows tools."""

    has_chat_template = True

    def __init__(self, chat_template: Any, shown: str) -> None:
        self.chat_template = chat_template
        self._shown = shown

    def apply_chat_template(self, turns: Any, *, tools: Any = None, chat_template: Any = None, **more: Any) -> str:
        template = chat_template
        if template is None and isinstance(self.chat_template, dict):
            template = self.chat_template["tool_use" if tools and "tool_use" in self.chat_template else "default"]
        return f"{template or self.chat_template}: {tools if template == self._shown else ''}"


def test_tools_that_a_template_of_the_load_drops_are_shown_by_the_checkpoint_s() -> None:
    engine = open_tiny(chat_template="<|im_start|>{{ messages[0].content }}")
    messages, tools = copy.deepcopy(CHAT[:1]), [copy.deepcopy(TOOL)]
    row = engine.prepare(b"1", Generate(model="tiny", messages=messages, tools=tools)).row
    tokenizer = library()[1]
    assert tokenizer.decode(row.prompt) == templates.render(tokenizer, CHAT[:1], [TOOL])
    plain = engine.prepare(b"2", Generate(model="tiny", messages=messages)).row
    assert tokenizer.decode(plain.prompt) == "<|im_start|>Tell me"
    assert (messages, tools) == (CHAT[:1], [TOOL])
    engine.close()


def test_of_named_templates_the_one_that_shows_tools_is_used() -> None:
    names = {"default": "A", "tool_use": "B"}
    assert templates.render(Named(names, "B"), CHAT[:1], [TOOL]) == f"B: {[TOOL]}"
    assert templates.render(Named(names, "A"), CHAT[:1], [TOOL]) == f"A: {[TOOL]}"
    overridden = Named("C", "B")
    setattr(overridden, templates.OWN_TEMPLATE, names)
    assert templates.render(overridden, CHAT[:1], [TOOL]) == f"B: {[TOOL]}"
    assert templates.render(overridden, CHAT[:1]) == "C: "


@pytest.mark.parametrize("chat_template", ["A", {"default": "A"}, {"default": "A", "tool_use": "B"}])
def test_tools_that_no_template_shows_are_refused(chat_template: Any) -> None:
    with pytest.raises(Refused, match=r"drops the 1 tools.*leave tools out.*chat_template") as refused:
        templates.render(Named(chat_template, "none"), CHAT[:1], [TOOL])
    assert refused.value.code is ErrorCode.UNSUPPORTED


def test_calls_whose_marks_are_not_known_are_said_to_be_in_the_text() -> None:
    engine = open_tiny(chat_template="{{ tools | tojson }}{{ messages[0].content }}: call with @name(...)")

    def said(**more: Any) -> tuple[list[Any], str]:
        return engine.prepare(b"1", Generate(model="tiny", messages=CHAT[:1], **more)).text.calls()

    calls, problem = said(tools=[TOOL])
    assert calls == []
    assert "the marks that this model puts around tool calls are not known" in problem
    assert said() == said(tools=[TOOL], channels=False) == ([], "")
    engine.close()
    engine = open_tiny()
    assert said(tools=[TOOL]) == ([], "")
    engine.close()


@pytest.mark.parametrize("said", ["Once upon", "Once upon ", "  Once", "a\n\nb\n", "END"])
def test_a_continued_prompt_is_that_of_transformers(said: str) -> None:
    tokenizer = library()[1]
    messages = [CHAT[0], ChatMessage(role="assistant", content=said)]
    before = copy.deepcopy(messages)
    wanted = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages], continue_final_message=True
    )
    assert templates.encode_messages(tokenizer, messages, None, None, continue_final=True) == wanted
    assert messages == before


def test_a_continued_request_can_be_resumed() -> None:
    engine = open_tiny()
    request = Generate(model="tiny", messages=CHAT, continue_final=True, max_tokens=8)
    resumed = Generate(
        model="tiny", messages=CHAT, continue_final=True, max_tokens=8, resume_tokens=[5, 6], resume_chars=2
    )
    first, second = engine.prepare(b"1", request).row, engine.prepare(b"2", resumed).row
    assert library()[1].decode(first.prompt).endswith("assistant\nOnce upon")
    assert (second.prompt, second.emitted) == (first.prompt, [5, 6])
    engine.close()


def test_a_template_that_changes_the_last_message_cannot_continue_it() -> None:
    for source in ("{{ messages[0].content }}", "{% for m in messages %}{{ m.content | upper }}{% endfor %}"):
        engine = open_tiny(chat_template=source)
        with pytest.raises(Refused, match=r"continue_final.*changes or drops.*9 characters") as refused:
            engine.prepare(b"1", Generate(model="tiny", messages=CHAT, continue_final=True))
        assert refused.value.code is ErrorCode.UNSUPPORTED
        engine.close()
    trimming = open_tiny(chat_template="{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    messages = [CHAT[0], ChatMessage(role="assistant", content=" Once  ")]
    row = trimming.prepare(b"1", Generate(model="tiny", messages=messages, continue_final=True)).row
    assert library()[1].decode(row.prompt) == "[Tell me][Once"
    trimming.close()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"prompt": "x"}, "needs messages"),
        ({"messages": CHAT[:1]}, r"messages\[0\].role is user"),
        ({"messages": [CHAT[0], ChatMessage(role="assistant", content=" ")]}, r"messages\[1\] has none"),
        ({"messages": [CHAT[0], ChatMessage(role="assistant", content=[Part(type="text", text="")])]}, "has none"),
        ({"messages": [CHAT[0], ChatMessage(role="assistant", content="x", tool_calls=[TOOL])]}, "has tool_calls"),
        ({"messages": CHAT, "response_format": ResponseFormat(type="choice", choices=["a"])}, "response_format"),
    ],
)
def test_what_cannot_be_continued_is_refused_by_name(more: dict[str, Any], words: str) -> None:
    problem = check(Generate(model="tiny", continue_final=True, **more))
    assert problem is not None
    assert problem.code is ErrorCode.BAD_REQUEST
    assert re.search(words, problem.message)
    assert check(Generate(model="tiny", messages=CHAT, continue_final=True)) is None


def test_a_template_of_the_load_that_never_works_fails_the_load() -> None:
    with pytest.raises(LoadProblem, match=r"chat_template, line 2: .*nope.*each of 4 small chats"):
        open_tiny(chat_template="{{ messages[0].content }}\n{{ nope() }}")
    needs_system = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}ok"
    open_tiny(chat_template=needs_system).close()


def test_the_checkpoint_s_templates_are_read_from_its_files(tmp_path: Any) -> None:
    assert own_template(tmp_path) is None
    assert own_template(model_directory("qwen3")) == library()[1].chat_template
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "tool_use", "template": "T"}, 3]}')
    assert own_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("new")
    assert own_template(tmp_path) == "new"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    assert own_template(tmp_path) == {"default": "new", "tool_use": "T"}


def test_which_special_tokens_there_are_is_told() -> None:
    tokenizer = library()[1]
    info = templates.describe(tokenizer, False)
    for name in ("bos", "eos", "pad"):
        assert getattr(info, name) is (getattr(tokenizer, f"{name}_token") is not None)
