"""What a request may say about the form of its answer and about log probabilities."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_bulkhead.protocol.checks import check_generate
from mlx_bulkhead.protocol.commands import Generate
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.values import ResponseFormat


def generate(**fields: Any) -> Generate:
    return Generate(model="tiny", **fields)


BAD_FORMATS: dict[str, tuple[ResponseFormat, str]] = {
    "unknown type": (ResponseFormat("xml"), "type must be one of json_schema, json_object, regex, choice, grammar"),
    "no schema": (ResponseFormat("json_schema"), "schema is missing; type json_schema needs it"),
    "no pattern": (ResponseFormat("regex"), "pattern is missing"),
    "no choices": (ResponseFormat("choice"), "choices is missing"),
    "no grammar": (ResponseFormat("grammar"), "grammar is missing"),
    "extra pattern": (ResponseFormat("json_object", pattern="a"), "pattern does not belong to type json_object"),
    "extra schema": (ResponseFormat("regex", pattern="a", schema={}), "schema does not belong to type regex"),
    "empty choices": (ResponseFormat("choice", choices=[]), "choices is empty"),
    "empty choice": (ResponseFormat("choice", choices=["a", ""]), "none of them empty"),
    "empty pattern": (ResponseFormat("regex", pattern=""), "pattern is empty"),
    "blank grammar": (ResponseFormat("grammar", grammar=" \n"), "grammar is empty"),
    "bytes in a schema": (ResponseFormat("json_schema", schema={"a": {1, 2}.__iter__()}), "JSON can hold"),
}


@pytest.mark.parametrize("name", list(BAD_FORMATS))
def test_a_bad_response_format(name: str) -> None:
    form, words = BAD_FORMATS[name]
    problem = check_generate(generate(prompt="x", response_format=form))
    assert problem is not None
    assert problem.code is ErrorCode.BAD_REQUEST
    assert problem.message.startswith("response_format.")
    assert words in problem.message


def test_a_response_format_has_a_largest_size() -> None:
    for form in (
        ResponseFormat("regex", pattern="a" * 2**17),
        ResponseFormat("choice", choices=["a" * 100] * 2000),
        ResponseFormat("json_schema", schema={"enum": ["a" * 100] * 2000}),
    ):
        problem = check_generate(generate(prompt="x", response_format=form))
        assert problem is not None
        assert problem.code is ErrorCode.TOO_LARGE
        assert "at most 131072" in problem.message


def test_a_schema_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"a": schema}
    problem = check_generate(generate(prompt="x", response_format=ResponseFormat("json_schema", schema=schema)))
    assert problem is not None


def test_top_logprobs_need_logprobs() -> None:
    problem = check_generate(generate(prompt="x", top_logprobs=3))
    assert problem is not None
    assert problem.message == "top_logprobs 3 needs logprobs true"
    assert check_generate(generate(prompt="x", logprobs=True, top_logprobs=20)) is None
