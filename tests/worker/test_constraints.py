"""Owns the checks of structured answers: each has its form, neighbours never notice."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from mlx_bulkhead.protocol.values import ChatMessage, ResponseFormat

from .test_engine import PROMPTS, Driver, expected, library

SHORT = {"type": "string", "maxLength": 12}
PERSON = {
    "type": "object",
    "properties": {
        "name": SHORT,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["calm", "wild", None, 7]},
        "home": {
            "type": "object",
            "properties": {"street": SHORT, "number": {"type": "integer", "minimum": 1, "maximum": 99}},
            "required": ["street", "number"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "mood", "home", "tags"],
    "additionalProperties": False,
}
GRAMMAR = """
start: sum
sum: NUMBER | "(" sum "+" NUMBER ")"
NUMBER: /[0-9]{1,3}/
"""
CHOICES = ["yes", "no", 'quo"te', "back\\slash", "line\nbreak", "Kätzchen 🐈"]


def form(kind: str, **fields: Any) -> dict[str, Any]:
    return {"response_format": ResponseFormat(kind, **fields)}


def ask(drive: Driver, prompt: str = PROMPTS[0], max_tokens: int = 600, **options: Any) -> str:
    drive.add("a", prompt, max_tokens, **options)
    drive.run()
    assert drive.finish["a"] == "stop"
    return drive.text["a"]


def check_person(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "age", "mood", "home", "tags"}
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 150
    assert value["mood"] in ("calm", "wild", None, 7)
    assert set(value["home"]) == {"street", "number"}
    assert 1 <= value["home"]["number"] <= 99
    assert 1 <= len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"a", "b"}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_schema_with_objects_enums_and_arrays(drive: Driver, temperature: float) -> None:
    for seed in range(4):
        options = {"temperature": temperature, "seed": seed, **form("json_schema", schema=PERSON)}
        check_person(ask(drive, PROMPTS[seed], **options))


def test_any_object(drive: Driver) -> None:
    # A random model has no reason to end an object; a bias for the brace gives it one.
    brace = library()[1].encode("}", add_special_tokens=False)[0]
    assert isinstance(json.loads(ask(drive, logit_bias={brace: 100.0}, **form("json_object"))), dict)


@pytest.mark.parametrize("pattern", ["[0-9]{4}-[0-9]{2}", "(foo|bar)+x{3}", "é{2}🐈?", "."])
def test_a_pattern(drive: Driver, pattern: str) -> None:
    for seed in range(3):
        assert re.fullmatch(pattern, ask(drive, temperature=1.0, seed=seed, **form("regex", pattern=pattern)))


def test_a_choice(drive: Driver) -> None:
    answers = {ask(drive, temperature=3.0, seed=seed, **form("choice", choices=CHOICES)) for seed in range(20)}
    assert answers <= set(CHOICES)
    assert len(answers) > 2
    for choice in CHOICES:
        assert ask(drive, **form("choice", choices=[choice])) == choice


def test_a_grammar(drive: Driver) -> None:
    for seed in range(6):
        text = ask(drive, temperature=1.0, seed=seed, **form("grammar", grammar=GRAMMAR))
        assert text.count("(") == text.count(")") == text.count("+")
        assert re.fullmatch(r"[(]*[0-9]{1,3}([+][0-9]{1,3}[)])*", text)


def test_penalties_and_bias_cannot_break_the_form(drive: Driver) -> None:
    tokenizer = library()[1]
    bias = {tokenizer.encode(text, add_special_tokens=False)[0]: 1000.0 for text in ("x", "the", "{")}
    options: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 2.0, "presence_penalty": -1.0}
    options |= {"temperature": 1.0, "seed": 3, "top_p": 0.9, "min_p": 0.05, "xtc_probability": 0.5, "top_k": 40}
    check_person(ask(drive, logit_bias=bias, **options, **form("json_schema", schema=PERSON)))


def test_neighbours_never_notice(drive: Driver) -> None:
    drive.add("free 0", PROMPTS[0], 60)
    drive.until(drive.generated("free 0", 5))
    for number in range(3):
        drive.add(f"bound {number}", PROMPTS[number], 300, **form("json_schema", schema=PERSON))
    drive.add("free 1", PROMPTS[1], 60)
    drive.run()
    assert drive.tokens["free 0"] == expected("qwen3", PROMPTS[0], 60)
    assert drive.tokens["free 1"] == expected("qwen3", PROMPTS[1], 60)
    for number in range(3):
        check_person(drive.text[f"bound {number}"])
    together = dict(drive.tokens)
    for number in range(3):
        ask(drive, PROMPTS[number], 300, **form("json_schema", schema=PERSON))
        assert drive.tokens["a"] == together[f"bound {number}"], "alone as in company"


def test_a_resume_goes_on_with_the_form(drive: Driver) -> None:
    options = {"temperature": 1.0, "seed": 5, **form("json_schema", schema=PERSON)}
    whole = ask(drive, **options)
    tokens = drive.tokens["a"]
    for cut in (1, len(tokens) // 2, len(tokens) - 1):
        drive.add("resumed", PROMPTS[0], 600, resume_tokens=tokens[:cut], **options)
        drive.run()
        assert drive.tokens["resumed"] == tokens
    check_person(whole)


# Reasoning.

QUESTION = [ChatMessage(role="user", content="How many?")]
DIGITS = form("regex", pattern="[0-9]{3}")


def think_marks() -> tuple[int, int]:
    tokenizer = library()[1]
    return tokenizer.think_start_id, tokenizer.think_end_id


def chat(drive: Driver, **options: Any) -> list[int]:
    from mlx_bulkhead.protocol.commands import Generate

    request = Generate(model="tiny", max_tokens=40, **{"messages": QUESTION, **options})
    prepared = drive.engine.prepare(b"a", request)
    drive.tokens["a"], drive.text["a"], drive.finish["a"] = list(prepared.row.emitted), "", None
    drive.prefill["a"], drive._streams["a"] = [], prepared.text
    drive.engine.insert(prepared.row)
    drive.run()
    return drive.tokens["a"]


def test_a_model_that_opens_a_block_is_free_until_it_closes_it(drive: Driver) -> None:
    start, end = think_marks()
    tokenizer = library()[1]
    tokens = chat(drive, logit_bias={start: 200.0}, presence_penalty=100.0, **DIGITS)
    assert tokens[0] == start
    assert tokens.count(end) == 0, "a random model does not close it, and must not end within it"
    assert len(tokens) == 40
    # The same, resumed right after the end of its reasoning.
    tokens = chat(drive, resume_tokens=[start, 400, 401, end], **DIGITS)
    assert re.fullmatch("[0-9]{3}", tokenizer.decode(tokens[4:-1]))
    assert drive.finish["a"] == "stop"


def test_a_mark_that_a_user_writes_opens_nothing(drive: Driver) -> None:
    from mlx_bulkhead.worker.text.markup import Markup

    tokenizer = library()[1]
    written = [ChatMessage(role="user", content="What does <think> mean? It has no end here.")]
    tokens = chat(drive, messages=written, template_args={"enable_thinking": False}, **DIGITS)
    assert re.fullmatch("[0-9]{3}", tokenizer.decode(tokens[:-1]))
    rendered = tokenizer.encode("<|im_start|>user\n<think> is a mark<|im_end|>\n<|im_start|>assistant\n")
    for prompt, reasoning in ((rendered, False), ([*rendered, *tokenizer.encode("<think>\n")], True)):
        splitter = Markup(tokenizer).splitter(prompt, tools=False)
        assert splitter is not None
        assert splitter.feed("so") == [("reasoning" if reasoning else "content", "so")]


def test_a_block_that_the_prompt_opens(drive: Driver) -> None:
    end = think_marks()[1]
    tokenizer = library()[1]
    drive.add("a", "How many? <think>", 40, logit_bias={end: 100.0}, presence_penalty=90.0, **DIGITS)
    drive.run()
    at = drive.tokens["a"].index(end)
    assert re.fullmatch("[0-9]{3}", tokenizer.decode(drive.tokens["a"][at + 1 : -1]))


def test_no_block_where_the_template_closed_it_or_there_is_no_chat(drive: Driver) -> None:
    start, _ = think_marks()
    tokens = chat(drive, logit_bias={start: 200.0}, template_args={"enable_thinking": False}, **DIGITS)
    assert start not in tokens
    assert re.fullmatch("[0-9]{3}", ask(drive, logit_bias={start: 200.0}, **DIGITS))
