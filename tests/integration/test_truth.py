"""Text and figures through the whole chain, against plain mlx-lm in a process of its own."""

from __future__ import annotations

import concurrent.futures
import itertools
from pathlib import Path

import pytest

from mlx_bulkhead import BadRequest, Client, ContextOverflow, UnknownModel
from tests.integration.conftest import Daemon, reference

PROMPTS = ["Hello world", "The harbour at night", "Příliš žluťoučký kůň", "日本の港", "🚢🌊 and 12345", "def f(x):\n"]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[dict[str, object]]:
    return reference(tiny_model, [{"prompt": p, "max_tokens": 96} for p in PROMPTS])


def test_greedy_text_equals_mlx_lm_alone_and_in_company(daemon: Daemon, expected: list[dict[str, object]]) -> None:
    with daemon.client() as client:
        for prompt, want in zip(PROMPTS, expected, strict=True):
            got = client.complete("tiny", prompt=prompt, max_tokens=96)
            assert got.tokens == want["tokens"]
            assert got.text == want["text"]
            assert got.finish_reason == want["finish_reason"]
            assert got.engine == "text"
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(lambda p: client.complete("tiny", prompt=p, max_tokens=96), PROMPTS))
        assert [r.text for r in together] == [want["text"] for want in expected]


def test_chat_messages_go_through_the_models_template(daemon: Daemon, tiny_model: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the harbour?"}]
    [want] = reference(tiny_model, [{"prompt": messages, "max_tokens": 40}])
    with daemon.client() as client:
        got = client.complete("tiny", messages=messages, max_tokens=40)
    assert got.text == want["text"]
    assert messages[0] == {"role": "system", "content": "Be brief."}


def test_snapshots_are_cumulative_and_clean(daemon: Daemon) -> None:
    with daemon.client() as client:
        stream = client.generate("tiny", prompt="🚢🌊", max_tokens=200)
        text = ""
        for snap in stream:
            assert "\ufffd" not in snap.text
            assert snap.text == text + snap.new_text
            text = snap.text
        result = stream.result()
    assert result.text == text
    assert result.usage.completion_tokens == 200 == len(result.tokens)
    assert result.usage.total_tokens == result.usage.prompt_tokens + 200
    assert result.timings.predicted_n == 200
    assert result.timings.predicted_per_second > 0
    assert result.timings.prompt_n == result.usage.prompt_tokens


@pytest.mark.parametrize("interval", [1, 8])
def test_the_stream_interval_changes_no_text(
    daemon: Daemon, expected: list[dict[str, object]], interval: int
) -> None:
    with daemon.client() as client:
        got = client.complete("tiny", prompt=PROMPTS[0], max_tokens=96, stream_interval=interval)
    assert got.text == expected[0]["text"]


def test_a_stop_string_cuts_exactly(daemon: Daemon, expected: list[dict[str, object]]) -> None:
    text = str(expected[1]["text"])
    with daemon.client() as client:
        for start, length in itertools.product((5, 23, 41), (1, 4, 9)):
            stop = text[start : start + length]
            got = client.complete("tiny", prompt=PROMPTS[1], max_tokens=96, stop=[stop])
            assert got.text == text[: text.index(stop)]
            assert got.finish_reason == "stop"


def test_seeds(daemon: Daemon) -> None:
    with daemon.client() as client:

        def ask(seed: int | None) -> str:
            return client.complete("tiny", prompt="dice", max_tokens=24, temperature=1.0, seed=seed).text

        assert ask(1) == ask(1) != ask(2)
        assert len({ask(None) for _ in range(5)}) > 1
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            crowd = list(pool.map(ask, [1, 2, 3, 4]))
        assert crowd[0] == ask(1)


def test_bad_input_with_numbers_and_then_a_good_request(daemon: Daemon) -> None:
    with daemon.client() as client:
        for bad, words in (
            ({"prompt": "a", "top_k": 2048}, "2048"),
            ({"prompt": "a", "logit_bias": {2048: 1.0}}, "2048"),
            ({"tokens": [1, 99_999]}, "99999"),
        ):
            with pytest.raises(BadRequest, match=words):
                client.complete("tiny", **bad)
        with pytest.raises(ContextOverflow, match="8192"):
            client.complete("tiny", tokens=[5] * 9000)
        with pytest.raises(UnknownModel):
            client.complete("other", prompt="a")
        assert (
            client.complete("tiny", prompt="a", max_tokens=4, temperature=1.0, top_k=5).usage.completion_tokens == 4
        )


def test_many_clients_at_once(daemon: Daemon, expected: list[dict[str, object]]) -> None:
    def session(index: int) -> None:
        with Client(daemon.run_dir) as client:
            which = index % len(PROMPTS)
            assert client.complete("tiny", prompt=PROMPTS[which], max_tokens=96).text == expected[which]["text"]

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        list(pool.map(session, range(24)))


def test_stats_tell_the_truth(daemon: Daemon) -> None:
    with daemon.client() as client:
        client.complete("tiny", prompt="a", max_tokens=8)
        [line] = [m for m in client.stats("tiny").models if m.name == "tiny"]
        assert line.state == "READY"
        assert line.info is not None
        assert line.info.versions["mlx-lm"]
        assert line.info.limits.context_tokens == 8192
        assert line.footprint > 2**20
        daemon_figures = client.stats().daemon
        assert daemon_figures["rss_bytes"] > 2**20
