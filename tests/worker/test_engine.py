"""Owns the driver of the engine tests, and the checks that greedy tokens are mlx-lm's in every phase."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.protocol.commands import Generate, Load
from mlx_bulkhead.worker.engines.base import Engine, PrefillOut, TokenOut

from tests.support.tiny_models import make_tiny

CACHES = ("qwen3", "gemma3_text", "qwen3_5")
"""One model for each kind of cache: plain, windowed, recurrent; the last two mixed with plain layers."""

PROMPTS = (
    "The lamp on the harbour wall goes out at seven",
    "1234",
    "Ráno jsme šli přes most k mlýnu, kde stará paní krmila kachny. " * 3,
    "今天下午我们去河边散步",
    "total",
)
CHUNKED = list(range(300, 750))
"""A prompt of 450 tokens: more than one chunk, and more than the window of the windowed models."""


@cache
def model_directory(architecture: str) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="bh-model-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return make_tiny(directory / architecture, architecture=architecture)


def open_tiny(architecture: str = "qwen3", **options: Any) -> Engine:
    from mlx_bulkhead.worker.engines.loader import open_engine

    options.setdefault("cache_entries", 0)  # what one test computes is not to help another
    options.setdefault("model", str(model_directory(architecture)))
    load = Load(name="tiny", **options)
    return open_engine(load, lambda phase, done, total: None)


@cache
def shared_engine(architecture: str = "qwen3") -> Engine:
    """One engine for all tests that leave it idle."""
    return open_tiny(architecture)


@cache
def library(architecture: str = "qwen3") -> tuple[Any, Any]:
    from mlx_lm import load

    return load(str(model_directory(architecture)))[:2]


@cache
def expected(architecture: str, prompt: str | tuple[int, ...], max_tokens: int) -> list[int]:
    """mlx-lm's own greedy tokens."""
    from mlx_lm import stream_generate

    model, tokenizer = library(architecture)
    ids = prompt if isinstance(prompt, str) else list(prompt)
    return [r.token for r in stream_generate(model, tokenizer, ids, max_tokens=max_tokens)]


class Driver:
    """Plays the executor: steps an engine and keeps what comes out, by request name."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.text: dict[str, str] = {}
        self.finish: dict[str, str | None] = {}
        self.prefill: dict[str, list[tuple[int, int]]] = {}
        self.cached: dict[str, int] = {}
        self.log: list[str] = []
        self._streams: dict[str, Any] = {}

    def add(self, name: str, prompt: str | list[int], max_tokens: int = 40, **options: Any) -> None:
        given = {"prompt": prompt} if isinstance(prompt, str) else {"tokens": prompt}
        request = Generate(model="tiny", max_tokens=max_tokens, **given, **options)
        prepared = self.engine.prepare(name.encode(), request)
        self.tokens[name] = list(prepared.row.emitted)
        self.text[name], self.finish[name], self.prefill[name] = "", None, []
        self._streams[name] = prepared.text
        self.engine.insert(prepared.row)

    def step(self) -> None:
        for out in self.engine.step():
            name = out.request_id.decode()
            if isinstance(out, PrefillOut):
                self.prefill[name].append((out.processed, out.total))
                self.cached[name] = out.cached
                continue
            assert isinstance(out, TokenOut)
            assert self.finish[name] is None, "a token after the last"
            self.tokens[name].append(out.token)
            self.log.append(name)
            self.finish[name] = out.finish
            if out.finish != "stop":
                self.text[name] += "".join(text for _, text in self._streams[name].push(out.token))
            if out.finish is not None:
                self.text[name] += "".join(text for _, text in self._streams[name].finish())

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.engine.busy
            self.step()

    def generated(self, name: str, count: int) -> Callable[[], bool]:
        return lambda: len(self.tokens[name]) >= count

    def run(self) -> None:
        while self.engine.busy:
            self.step()

    def drop(self, name: str) -> bool:
        return self.engine.remove(name.encode())


@pytest.fixture(params=CACHES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("architecture", [*CACHES, "llama", "gemma4_text"])
def test_a_lone_row_gives_the_tokens_of_the_library(architecture: str) -> None:
    driver = Driver(shared_engine(architecture))
    for number, prompt in enumerate(PROMPTS[:3]):
        driver.add(str(number), prompt, 80)
        driver.run()
        assert driver.tokens[str(number)] == expected(architecture, prompt, 80)
        assert driver.finish[str(number)] == "length"
        assert driver.engine.served(str(number).encode()).engine == "text"


def test_a_long_prompt_goes_in_chunks(architecture: str) -> None:
    driver = Driver(shared_engine(architecture))
    driver.add("a", CHUNKED, 30)
    driver.run()
    assert driver.tokens["a"] == expected(architecture, tuple(CHUNKED), 30)
    processed = [done for done, _ in driver.prefill["a"]]
    assert processed == sorted(set(processed))
    assert driver.prefill["a"][-1] == (450, 450)


def test_rows_together_give_the_tokens_of_each_alone(architecture: str) -> None:
    driver = Driver(shared_engine(architecture))
    for number, prompt in enumerate(PROMPTS):
        driver.add(str(number), prompt, 40 + 15 * number)
    driver.run()
    for number, prompt in enumerate(PROMPTS):
        assert driver.tokens[str(number)] == expected(architecture, prompt, 40 + 15 * number)
        assert driver.finish[str(number)] == "length"
        assert driver.prefill[str(number)][-1][0] == driver.prefill[str(number)][-1][1]


def test_rows_come_and_go_while_others_decode(architecture: str) -> None:
    driver = Driver(shared_engine(architecture))
    driver.add("first", PROMPTS[0], 80)
    driver.until(driver.generated("first", 7))
    driver.add("second", PROMPTS[1], 60)
    driver.add("victim", PROMPTS[3], 80)
    driver.until(driver.generated("second", 5))
    driver.add("third", CHUNKED, 20)
    driver.step()
    assert driver.drop("victim")
    driver.until(driver.generated("third", 3))
    driver.add("fourth", PROMPTS[4], 1)
    driver.run()
    assert driver.tokens["first"] == expected(architecture, PROMPTS[0], 80)
    assert driver.tokens["second"] == expected(architecture, PROMPTS[1], 60)
    assert driver.tokens["third"] == expected(architecture, tuple(CHUNKED), 20)
    assert driver.tokens["fourth"] == expected(architecture, PROMPTS[4], 1)
    victim = driver.tokens["victim"]
    assert victim == expected(architecture, PROMPTS[3], 80)[: len(victim)]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 30])
def test_company_at_any_moment_changes_nothing(architecture: str, steps: int) -> None:
    """The solo row moves into the batch: before its prefill, within it, at its end, while it decodes."""
    driver = Driver(shared_engine(architecture))
    driver.add("solo", CHUNKED, 40)
    for _ in range(steps):
        driver.step()
    driver.add("other", PROMPTS[0], 40)
    driver.run()
    assert driver.tokens["solo"] == expected(architecture, tuple(CHUNKED), 40)
    assert driver.tokens["other"] == expected(architecture, PROMPTS[0], 40)
    assert driver.engine.served(b"other").engine in ("batch", "text")


def test_a_row_that_ends_in_the_moment_of_company(drive: Driver) -> None:
    drive.add("solo", PROMPTS[0], 3)
    drive.until(drive.generated("solo", 2))
    drive.add("other", PROMPTS[1], 20)
    drive.run()
    assert drive.tokens["solo"] == expected("qwen3", PROMPTS[0], 3)
    assert drive.finish["solo"] == "length"
    assert drive.tokens["other"] == expected("qwen3", PROMPTS[1], 20)


def test_a_row_left_alone_goes_back_to_solo(drive: Driver) -> None:
    drive.add("long", PROMPTS[0], 150)
    drive.until(drive.generated("long", 5))
    drive.add("short", PROMPTS[1], 10)
    drive.until(lambda: drive.finish["short"] is not None)
    assert drive.engine.served(b"long").engine == "batch"
    drive.until(drive.generated("long", 60))
    assert drive.engine.served(b"long").engine == "text"
    drive.add("late", PROMPTS[2], 10)  # and into the batch once more
    drive.run()
    assert drive.tokens["long"] == expected("qwen3", PROMPTS[0], 150)
    assert drive.tokens["short"] == expected("qwen3", PROMPTS[1], 10)
    assert drive.tokens["late"] == expected("qwen3", PROMPTS[2], 10)


@pytest.mark.parametrize("cut", [1, 17, 39])
@pytest.mark.parametrize("company", [False, True])
def test_a_resumed_row_goes_on_with_the_same_tokens(architecture: str, cut: int, company: bool) -> None:
    driver = Driver(shared_engine(architecture))
    whole = expected(architecture, PROMPTS[0], 40)
    if company:
        driver.add("other", PROMPTS[1], 30)
    driver.add("resumed", PROMPTS[0], 40, resume_tokens=whole[:cut])
    driver.run()
    assert driver.tokens["resumed"] == whole
    assert driver.finish["resumed"] == "length"


def test_many_rows_at_once(drive: Driver) -> None:
    for number in range(20):
        drive.add(str(number), CHUNKED[number : 2 * number + 5], 12)
    drive.run()
    for number in range(20):
        assert drive.tokens[str(number)] == expected("qwen3", tuple(CHUNKED[number : 2 * number + 5]), 12)


def test_eight_short_prompts_are_prefilled_together(drive: Driver) -> None:
    for number in range(8):
        drive.add(str(number), CHUNKED[number : number + 12], 4)
    steps = 0
    while not all(drive.tokens.values()):
        drive.step()
        steps += 1
    assert steps <= 4


@pytest.mark.parametrize("company", [False, True])
def test_the_end_of_sequence_token_ends_a_row(drive: Driver, company: bool) -> None:
    _, tokenizer = library()
    end = tokenizer.eos_token_id
    if company:
        drive.add("other", PROMPTS[1], 20)
    drive.add("ended", PROMPTS[0], 20, logit_bias={end: 1000.0})
    drive.run()
    assert drive.tokens["ended"] == [end]
    assert drive.finish["ended"] == "stop"
    assert drive.text["ended"] == ""
    if company:
        assert drive.tokens["other"] == expected("qwen3", PROMPTS[1], 20)


def test_a_prompt_of_one_token(drive: Driver) -> None:
    drive.add("a", [400], 5)
    drive.run()
    drive.add("b", [400], 5)
    drive.add("c", [401], 5)
    drive.run()
    assert drive.tokens["a"] == drive.tokens["b"] == expected("qwen3", (400,), 5)
    assert drive.tokens["c"] == expected("qwen3", (401,), 5)


def test_a_running_row_is_not_starved_by_a_long_prompt(drive: Driver) -> None:
    drive.add("stream", PROMPTS[0], 400)
    drive.until(drive.generated("stream", 5))
    drive.log.clear()
    drive.add("long", CHUNKED * 2, 5)
    drive.until(drive.generated("long", 1))
    assert drive.log.count("stream") >= len(drive.prefill["long"]) - 1
    assert len(drive.prefill["long"]) > 4
    drive.drop("stream")
    drive.run()
    assert drive.tokens["long"] == expected("qwen3", tuple(CHUNKED * 2), 5)
