"""Structured answers and log probabilities through the whole chain, and across the death of a worker."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from mlx_bulkhead import BadRequest
from tests.integration.conftest import Daemon

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "tag": {"enum": ["a", "b"]}},
    "required": ["n", "tag"],
    "additionalProperties": False,
}
ASK: dict[str, Any] = {"prompt": "The harbour at night", "logprobs": True, "top_logprobs": 3}


def test_structured_answers_beside_free_ones(daemon: Daemon) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    with daemon.client() as client:
        free = client.complete("tiny", prompt="Hello world", max_tokens=80).text

        def ask(number: int) -> str:
            if number % 2:
                return client.complete("tiny", prompt="Hello world", max_tokens=80).text
            options: dict[str, Any] = {"temperature": 1.0, "seed": number, "response_format": form}
            result = client.complete("tiny", prompt="Hello", max_tokens=200, **options)
            assert result.finish_reason == "stop"
            return result.text

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(ask, range(12)))
    for number, answer in enumerate(answers):
        if number % 2:
            assert answer == free
        else:
            value = json.loads(answer)
            assert set(value) == {"n", "tag"}
            assert 0 <= value["n"] <= 9


def test_a_bad_form_and_then_a_good_one(daemon: Daemon) -> None:
    with daemon.client() as client:
        for bad, words in (
            ({"type": "regex", "pattern": "(["}, "unclosed"),
            ({"type": "json_schema", "schema": {"type": "nonsense"}}, "nonsense"),
            ({"type": "grammar", "grammar": "start: missing"}, "missing"),
            ({"type": "xml"}, "response_format.type"),
            ({"type": "choice"}, "choices is missing"),
        ):
            with pytest.raises(BadRequest, match=words):
                client.complete("tiny", prompt="a", response_format=bad)
        good = {"type": "regex", "pattern": "[0-9]{4}"}
        assert re.fullmatch("[0-9]{4}", client.complete("tiny", prompt="a", response_format=good).text)


def test_log_probabilities_of_snaps_are_those_of_the_result(daemon: Daemon) -> None:
    with daemon.client() as client:
        stream = client.generate("tiny", max_tokens=60, stream_interval=8, **ASK)
        values: list[float] = []
        for snap in stream:
            assert len(snap.tokens) == len(snap.logprobs) == len(snap.top_logprobs)
            values += snap.logprobs
        result = stream.result()
    assert result.logprobs == values
    assert len(values) == 60
    for token, value, top in zip(result.tokens, result.logprobs, result.top_logprobs, strict=True):
        assert top[token] == value == max(top.values())
        assert len(top) == 3


def test_log_probabilities_and_forms_across_a_crash(own_daemon: Daemon, tiny_model: Path) -> None:
    form = {"type": "regex", "pattern": "[a-z ]{300}"}
    with own_daemon.client() as client:
        client.load("tiny", tiny_model)
        for options in ({}, {"response_format": form, "temperature": 1.0, "seed": 4}):
            whole = client.complete("tiny", max_tokens=400, **ASK, **options)
            killed = False
            stream = client.generate("tiny", max_tokens=400, **ASK, **options)
            for snap in stream:
                if not killed and len(snap.text) > 30:
                    [model] = [m for m in client.stats("tiny").models if m.name == "tiny"]
                    assert model.pid is not None
                    os.kill(model.pid, signal.SIGKILL)
                    killed = True
            result = stream.result()
            assert killed
            assert result.restarts == 1
            assert result.tokens == whole.tokens
            assert result.text == whole.text
            assert result.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
            assert len(result.top_logprobs) == len(result.tokens)
