"""Answers that go on from the last message of a chat: text equal to mlx-lm's, streamed, and across a death."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mlx_bulkhead import Client
from tests.integration.conftest import Daemon, reference

SAID = ["Once upon", "The boats come ", "Žluté listí padá na dla", "Look: 🚢", "```\ndef total(values):\n"]
LENGTH = 400


def chat(said: Any) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Tell me of the harbour"},
        {"role": "assistant", "content": said},
    ]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, dict[str, object]]:
    jobs = [{"prompt": chat(said), "max_tokens": LENGTH, "continued": True} for said in SAID]
    return dict(zip(SAID, reference(tiny_model, jobs), strict=True))


def ask(client: Client, said: Any) -> Any:
    return client.generate("tiny", messages=chat(said), continue_final=True, max_tokens=LENGTH)


@pytest.mark.parametrize("said", SAID)
def test_the_streamed_text_is_that_of_mlx_lm(
    daemon: Daemon, expected: dict[str, dict[str, object]], said: str
) -> None:
    want = expected[said]
    with daemon.client() as client:
        for content in (said, [{"type": "text", "text": said}]):
            stream = ask(client, content)
            pieces = [(snap.new_text, snap.new_reasoning, snap.tokens) for snap in stream]
            result = stream.result()
            assert "".join(text for text, _, _ in pieces) == result.text == want["text"]
            assert [token for _, _, tokens in pieces for token in tokens] == result.tokens == want["tokens"]
            assert not any(reasoning for _, reasoning, _ in pieces)
            assert result.finish_reason == want["finish_reason"] == "length"


def test_it_is_another_answer_than_that_to_the_question(daemon: Daemon, expected: dict[str, Any]) -> None:
    with daemon.client() as client:
        fresh = client.complete("tiny", messages=chat("")[:2], max_tokens=40).text
        after = client.complete("tiny", messages=chat(SAID[0]), max_tokens=40).text
    assert len({fresh, after, expected[SAID[0]]["text"][:40]}) == 3


@pytest.mark.parametrize("tokens", [1, 120])
def test_a_death_in_the_middle_leaves_no_seam(
    own_daemon: Daemon, tiny_model: Path, expected: dict[str, Any], tokens: int
) -> None:
    with own_daemon.client() as client:
        client.load("tiny", tiny_model)
        streams = {said: ask(client, said) for said in SAID}
        seen = dict.fromkeys(SAID, "")
        for said, stream in streams.items():
            have = 0
            for snap in stream:
                have, seen[said] = have + len(snap.tokens), seen[said] + snap.new_text
                if have >= tokens:
                    break
        [model] = [model for model in client.models() if model.name == "tiny"]
        assert model.pid is not None
        os.kill(model.pid, signal.SIGKILL)
        results = {}
        for said, stream in streams.items():
            for snap in stream:
                seen[said] += snap.new_text
            results[said] = stream.result()
    for said, result in results.items():
        assert seen[said] == result.text == expected[said]["text"]
        assert result.tokens == expected[said]["tokens"]
    assert any(result.restarts == 1 for result in results.values())
