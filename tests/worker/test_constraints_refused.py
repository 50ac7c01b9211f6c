"""Owns the checks of forms that cannot be met: refused in plain words, and the next request is right."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

import pytest
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.values import ResponseFormat
from mlx_bulkhead.worker.engines.base import Refused
from mlx_bulkhead.worker.text.constraints import Constraints

from .test_constraints import DIGITS, ask, form
from .test_engine import PROMPTS, Driver, expected, library


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (form("json_schema", schema={"type": "nonsense"}), "nonsense"),
        (form("json_schema", schema={"type": "object", "dependencies": {"a": ["b"]}}), "dependencies"),
        (form("json_schema", schema={"$ref": "http://example.com/x"}), "example.com"),
        (form("json_schema", schema={"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (form("regex", pattern="(["), "unclosed"),
        (form("grammar", grammar="start: missing"), "missing"),
        (form("grammar", grammar="nothing here"), "response_format"),
    ],
)
def test_a_bad_form_is_refused_and_does_no_harm(drive: Driver, bad: dict[str, Any], word: str) -> None:
    with pytest.raises(Refused) as refused:
        drive.add("bad", PROMPTS[0], **bad)
    assert refused.value.code is ErrorCode.BAD_REQUEST
    assert refused.value.message.startswith("response_format: ")
    assert word in refused.value.message
    assert re.fullmatch("[0-9]{3}", ask(drive, **DIGITS))


def test_hostile_forms_cost_little(drive: Driver) -> None:
    hostile = [
        form("regex", pattern="(.*a){200}.{1000}"),
        form("regex", pattern="(a{1,1000}){1,1000}"),
        form("regex", pattern="[ab]*a[ab]{20}"),
        form("grammar", grammar='start: start start | "a" | '),
        form("grammar", grammar='start: a+\na: b b | b\nb: c c | c\nc: "x" | "xx" | /x+/'),
        form("json_schema", schema={"enum": [f"v{number}" for number in range(5000)]}),
    ]
    began = time.monotonic()
    drive.add("free", PROMPTS[0], 60)
    for number, bad in enumerate(hostile):
        with contextlib.suppress(Refused):
            drive.add(f"bad {number}", PROMPTS[1], 40, **bad)
    drive.run()
    assert drive.tokens["free"] == expected("qwen3", PROMPTS[0], 60)
    assert time.monotonic() - began < 20


def test_forms_are_kept_ready_but_not_for_ever() -> None:
    tokenizer = library()[1]
    constraints = Constraints(tokenizer, 2048, frozenset(tokenizer.eos_token_ids))
    for number in range(50):
        constraints.make(ResponseFormat("regex", pattern=f"a{{{number + 1}}}"), [1], may_think=False, partial=True)
    assert len(constraints._ready) == 32


def test_a_model_without_an_end_token_cannot_do_it() -> None:
    with pytest.raises(Refused) as refused:
        Constraints(library()[1], 2048, frozenset()).make(
            ResponseFormat("json_object"), [1], may_think=False, partial=True
        )
    assert refused.value.code is ErrorCode.UNSUPPORTED
