"""Owns the checks of splitting an answer into channels, and of parsing tool calls. No model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_bulkhead.worker.text.channels import HarmonySplitter, RawCall, Splitter, Tags, TagSplitter
from mlx_bulkhead.worker.text.output import Channels, TextStream
from mlx_bulkhead.worker.text.tools import MAX_CALL_CHARS, MAX_CALLS, parse_calls

QWEN = Tags("<think>", "</think>", "<tool_call>", "</tool_call>")
OPEN = Tags("<think>", "</think>", "<tool_call>", "</tool_call>", inside=True)
BEGUN = Tags("<think>", "</think>", begun=True)
GEMMA = Tags("<|channel>thought", "<channel|>", "<|tool_call>", "<tool_call|>")
MISTRAL = Tags(tool_start="[TOOL_CALLS]")
HARMONY_CALL = '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}'
PLAIN_THINKER = Tags("<think>", "</think>")


def split(splitter: Splitter, pieces: Iterable[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for piece in pieces:
        for channel, text in splitter.feed(piece):
            texts[channel] = texts.get(channel, "") + text
    for channel, text in splitter.finish():
        texts[channel] = texts.get(channel, "") + text
    return texts


CASES: list[tuple[Callable[[], Splitter], str, dict[str, str], list[str]]] = [
    (lambda: TagSplitter(QWEN), "Just text.", {"content": "Just text."}, []),
    (lambda: TagSplitter(QWEN), "\n Just text.", {"content": "\n Just text."}, []),
    (lambda: TagSplitter(QWEN), "<think>\nhm</think>\n\nyes", {"reasoning": "hm", "content": "yes"}, []),
    (lambda: TagSplitter(QWEN), " \n<think>hm\n</think>yes", {"reasoning": "hm\n", "content": "yes"}, []),
    (lambda: TagSplitter(QWEN), "<think></think>yes", {"content": "yes"}, []),
    (lambda: TagSplitter(QWEN), "<think>a</think>\n<think>b</think>c", {"reasoning": "ab", "content": "c"}, []),
    (lambda: TagSplitter(OPEN), "\nhm</think>yes", {"reasoning": "hm", "content": "yes"}, []),
    # Literal tags in an answer survive.
    (lambda: TagSplitter(QWEN), "Use <think>x</think> so.", {"content": "Use <think>x</think> so."}, []),
    (lambda: TagSplitter(OPEN), "a</think>b</think>c", {"reasoning": "a", "content": "b</think>c"}, []),
    (lambda: TagSplitter(OPEN), "a<think>b</think>c", {"reasoning": "a<think>b", "content": "c"}, []),
    # What looks like a mark and is none; what never closes.
    (lambda: TagSplitter(QWEN), "<thin", {"content": "<thin"}, []),
    (lambda: TagSplitter(QWEN), "<thinker>", {"content": "<thinker>"}, []),
    (lambda: TagSplitter(QWEN), "<think>hm</thin", {"reasoning": "hm</thin"}, []),
    (lambda: TagSplitter(QWEN), "<think>hm</think>\n", {"reasoning": "hm"}, []),
    (lambda: TagSplitter(PLAIN_THINKER), "a<tool_call>{}</tool_call>", {"content": "a<tool_call>{}</tool_call>"}, []),
    (lambda: TagSplitter(BEGUN), "<think>a</think>b", {"content": "<think>a</think>b"}, []),
    (lambda: TagSplitter(GEMMA), "<|channel>thought\nhm<channel|>yes", {"reasoning": "hm", "content": "yes"}, []),
    (
        lambda: TagSplitter(QWEN),
        "<think>hm</think>\nLook:\n<tool_call>\n{1}\n</tool_call>\n<tool_call>{2}</tool_call>\n",
        {
            "reasoning": "hm",
            "content": "Look:\n\n",
            "tool_calls": "<tool_call>\n{1}\n</tool_call><tool_call>{2}</tool_call>",
        },
        ["\n{1}\n", "{2}"],
    ),
    (
        lambda: TagSplitter(QWEN),
        "<tool_call>{1}</tool_call>\nDone <tool_call>{2}",
        {"content": "\nDone ", "tool_calls": "<tool_call>{1}</tool_call><tool_call>{2}"},
        ["{1}", "{2}"],
    ),
    (
        lambda: TagSplitter(MISTRAL),
        'Well [TOOL_CALLS][{"name": "f"}]',
        {"content": "Well ", "tool_calls": '[TOOL_CALLS][{"name": "f"}]'},
        ['[{"name": "f"}]'],
    ),
    (HarmonySplitter, "No marks here.", {"content": "No marks here."}, []),
    (HarmonySplitter, "<|channel|>final<|message|>yes", {"content": "yes"}, []),
    (
        HarmonySplitter,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes <|x",
        {"reasoning": "hm", "content": "yes <|x"},
        [],
    ),
    (
        HarmonySplitter,
        "<|channel|>analysis<|message|>hm<|end|>" + HARMONY_CALL,
        {"reasoning": "hm", "tool_calls": HARMONY_CALL},
        ['{"a": 1}'],
    ),
    (
        HarmonySplitter,
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        "<|constrain|>json<|message|>{}<|call|>",
        {
            "content": "I will look.",
            "tool_calls": "<|start|>assistant<|channel|>commentary to=functions.f "
            "<|constrain|>json<|message|>{}<|call|>",
        },
        ["{}"],
    ),
]


@pytest.mark.parametrize(("make", "text", "channels", "calls"), CASES, ids=[case[1][:40] for case in CASES])
def test_each_mark(make: Callable[[], Splitter], text: str, channels: dict[str, str], calls: list[str]) -> None:
    for pieces in ([text], list(text)):
        splitter = make()
        assert split(splitter, pieces) == channels
        assert [call.body for call in splitter.calls] == calls


@given(st.sampled_from(CASES), st.data())
def test_how_the_text_is_cut_does_not_matter(case: Any, data: st.DataObject) -> None:
    make, text, channels, _ = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    assert split(make(), [text[a:b] for a, b in itertools.pairwise(bounds)]) == channels


MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "a", " ", "\n", "<thi", "</tool"]
HARMONY = [
    "<|channel|>",
    "analysis",
    "final",
    "<|message|>",
    "<|end|>",
    "<|start|>",
    "assistant",
    " to=f",
    "a",
]


@given(st.lists(st.sampled_from(MARKS)), st.booleans())
def test_no_visible_character_of_tagged_text_is_lost(words: list[str], inside: bool) -> None:
    splitter = TagSplitter(OPEN if inside else QWEN)
    text = "".join(words)
    one_by_one, at_once = split(splitter, list(text)), split(TagSplitter(OPEN if inside else QWEN), [text])
    assert one_by_one == at_once
    letters = "".join(one_by_one.get(channel, "") for channel in ("reasoning", "content", "tool_calls"))
    assert letters.count("a") == text.count("a")


@given(st.lists(st.sampled_from(HARMONY)))
def test_harmony_of_any_shape_is_read_the_same_in_any_pieces(words: list[str]) -> None:
    text = "".join(words)
    assert split(HarmonySplitter(), list(text)) == split(HarmonySplitter(), [text])


class Letters:
    """A detokenizer: each token is a character."""

    def push(self, token: int) -> str:
        return chr(token)

    def finish(self) -> str:
        return ""


def stream(stops: list[str] | None = None) -> TextStream:
    return TextStream(Letters(), stops or [], frozenset(), Channels(TagSplitter(QWEN), lambda raw: ([], "")))


WHOLE = "<think>\nhm</think>\n\nLook <tool_call>{1}</tool_call>"
SPLIT = {"reasoning": "hm", "content": "Look ", "tool_calls": "<tool_call>{1}</tool_call>"}


def read(pieces: Iterable[tuple[str, str]], texts: dict[str, str]) -> None:
    for channel, text in pieces:
        texts[channel] = texts.get(channel, "") + text


@pytest.mark.parametrize("text", ["<think></think>", "<think>\n\n</think>\n", "<think>", "  \n"])
def test_an_answer_of_marks_alone_is_not_empty(text: str) -> None:
    answer, texts = stream(), dict[str, str]()
    for char in text:
        read(answer.push(ord(char)), texts)
    read(answer.finish(), texts)
    assert texts == {"content": text}


def test_a_resumed_answer_goes_on_in_each_channel_where_it_was_sent() -> None:
    for cut in range(len(WHOLE) + 1):
        before, sent = stream(), dict[str, str]()
        for char in WHOLE[:cut]:
            read(before.push(ord(char)), sent)
        for lost in (0, 1):
            had = {name: text[: len(text) - lost] for name, text in sent.items()}
            after = stream()
            counts = [len(had.get(name, "")) for name in ("content", "reasoning", "tool_calls")]
            after.replay([ord(char) for char in WHOLE[:cut]], *counts)
            for char in WHOLE[cut:]:
                read(after.push(ord(char)), had)
            read(after.finish(), had)
            assert had == SPLIT


def test_stop_strings_count_in_the_content_only() -> None:
    answer, texts = stream(["hm", "ok", "{1}"]), dict[str, str]()
    for char in WHOLE:
        read(answer.push(ord(char)), texts)
    assert texts == {"reasoning": "hm", "content": "Lo"}
    assert answer.stopped
    assert not answer.finish()


TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def parser(text: str, tools: Any) -> Any:
    return json.loads(text)


def parse(*raw: RawCall) -> tuple[list[tuple[str, str]], str]:
    calls, problem = parse_calls(raw, parser, TOOLS, "call_")
    assert [call.id for call in calls] == [f"call_{number}" for number in range(len(calls))]
    return [(call.name, call.arguments) for call in calls], problem


def test_calls_are_parsed_whatever_form_the_parser_gives() -> None:
    one = '{"name": "weather", "arguments": {"city": "Brno"}}'
    text = json.dumps({"name": "weather", "arguments": '{"city": "Brno"}'})
    wanted = ("weather", '{"city": "Brno"}')
    assert parse(RawCall(one), RawCall(text)) == ([wanted, wanted], "")
    assert parse(RawCall(f"[{one}, {one}]")) == ([wanted, wanted], "")
    assert parse(RawCall('{"city": "Brno"}', "weather")) == ([wanted], "")
    assert parse(RawCall('{"name": "weather"}')) == ([("weather", "{}")], "")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (RawCall("{"), "could not be parsed: JSONDecodeError"),
        (RawCall("{}", whole=False), "it has no end"),
        (RawCall("7"), "it names no tool"),
        (RawCall('{"name": 7}'), "it names no tool"),
        (RawCall('{"name": "weather", "arguments": [1]}'), "its arguments are list"),
        (RawCall("x" * (MAX_CALL_CHARS + 1)), f"{MAX_CALL_CHARS} are the limit"),
        (RawCall("[" * 200_000), "RecursionError"),
    ],
)
def test_what_cannot_be_parsed_is_named_and_the_others_stay(raw: RawCall, words: str) -> None:
    good = RawCall('{"name": "weather"}')
    calls, problem = parse(raw, good)
    assert calls == [("weather", "{}")]
    assert words in problem
    assert problem.startswith("call 1 ")


def test_a_tool_that_was_not_given_is_flagged() -> None:
    calls, problem = parse(RawCall('{"name": "delete"}'))
    assert calls == [("delete", "{}")]
    assert problem == "call 1 is to 'delete', which is not among the tools"


def test_a_flood_of_calls_is_cut() -> None:
    calls, problem = parse(*[RawCall('{"name": "weather"}')] * (MAX_CALLS + 5))
    assert len(calls) == MAX_CALLS
    assert "the others are left out" in problem
