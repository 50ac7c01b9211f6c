"""Owns the checks of adapters that come and go beside running rows: text unchanged, and every refusal."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.protocol import limits
from mlx_bulkhead.protocol.codec import new_request_id
from mlx_bulkhead.protocol.commands import AddAdapter, DropAdapter
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.events import AdaptersReply, Failed
from mlx_bulkhead.worker.engines.base import Engine, LoadProblem, Refused

from tests.support.tiny_adapters import make_adapter
from tests.support.worker_harness import NAME, WorkerHarness, loaded_worker

from .test_adapters import LONG, adapters, wanted
from .test_engine import CACHES, PROMPTS, Driver, expected, model_directory, open_tiny


def names(engine: Engine) -> list[str]:
    return [info.name for info in engine.info.adapters]


def add(engine: Engine, name: str, architecture: str = "qwen3") -> None:
    engine.add_adapter(name, Path(adapters(architecture)[name]))


@pytest.mark.parametrize("architecture", CACHES)
def test_n01_on_off_and_on_again_on_a_model_loaded_without(architecture: str) -> None:
    """Field report N01: chosen per request, no reload."""
    engine = open_tiny(architecture, cache_entries=16)
    drive = Driver(engine)
    add(engine, "A", architecture)
    for adapter in ("A", "base", "A"):
        drive.add("one", PROMPTS[0], 16, adapter=adapter)
        drive.run()
        assert drive.tokens["one"] == wanted(architecture, adapter, PROMPTS[0], 16), adapter
    engine.close()


@pytest.mark.parametrize("architecture", CACHES)
def test_n02_running_rows_are_undisturbed(architecture: str) -> None:
    """Field report N02: rows in prefill, alone and in a batch go on as if nothing were added or dropped."""
    engine = open_tiny(architecture)
    drive = Driver(engine)
    drive.add("alone", PROMPTS[0], 80)
    drive.until(drive.generated("alone", 5))
    add(engine, "A", architecture)
    drive.step()
    drive.add("A", PROMPTS[0], 30, adapter="A")
    drive.add("long", LONG, 20)
    drive.until(drive.generated("A", 4))
    add(engine, "B", architecture)
    drive.add("B", PROMPTS[1], 20, adapter="B")
    drive.until(lambda: drive.finish["B"] is not None)
    engine.drop_adapter("B")
    drive.run()
    assert drive.tokens["alone"] == expected(architecture, PROMPTS[0], 80)
    assert drive.tokens["long"] == expected(architecture, tuple(LONG), 20)
    assert drive.tokens["A"] == wanted(architecture, "A", PROMPTS[0], 30)
    assert drive.tokens["B"] == wanted(architecture, "B", PROMPTS[1], 20)
    engine.drop_adapter("A")
    drive.add("base", PROMPTS[2], 20)
    drive.run()
    assert drive.tokens["base"] == expected(architecture, PROMPTS[2], 20)
    engine.close()


def test_beside_a_row_that_is_speculated_for() -> None:
    """The layers are built around the model's own, whatever the library's hooks are between two steps."""
    from mlx_bulkhead.protocol.values import Draft

    from tests.support.speculation import LOOP, draft_directory

    draft = Draft(str(draft_directory("qwen3")), cache_entries=0, verify_mode="dflash")
    engine = open_tiny("qwen3", draft=draft)
    drive = Driver(engine)
    drive.add("base", LOOP, 60, speculative="on")
    drive.until(drive.generated("base", 5))
    assert engine.served(b"base").engine == "dflash"
    add(engine, "A")
    drive.add("A", PROMPTS[0], 20, adapter="A")
    drive.until(lambda: drive.finish["A"] is not None)
    assert engine.served(b"A").engine == "text"
    engine.drop_adapter("A")
    drive.run()
    assert drive.tokens["A"] == wanted("qwen3", "A", PROMPTS[0], 20)
    assert drive.tokens["base"] == expected("qwen3", LOOP, 60)
    engine.close()


def test_names() -> None:
    engine = open_tiny(adapters={"A": adapters("qwen3")["A"]}, adapter="A")
    before = engine.info
    add(engine, "A")
    assert engine.info == before, "the same once more is no mistake"
    with pytest.raises(
        LoadProblem, match=r"adapter 'A': the model has one of this name from .*/A; drop it"
    ) as caught:
        engine.add_adapter("A", Path(adapters("qwen3")["B"]))
    assert caught.value.code is ErrorCode.BAD_REQUEST
    add(engine, "B")
    assert [(i.name, i.kind, i.default) for i in engine.info.adapters] == [("A", "lora", True), ("B", "dora", False)]
    assert names(engine) == ["A", "B"]
    assert [i.name for i in before.adapters] == ["A"], "what was told before is not changed under its reader"
    with pytest.raises(Refused, match="adapter is 'C', and the adapters of this model are A, B"):
        engine.drop_adapter("C")
    with pytest.raises(Refused, match="adapter 'A' serves the requests that name none"):
        engine.drop_adapter("A")
    engine.drop_adapter("B")
    assert names(engine) == ["A"]
    with pytest.raises(Refused, match="adapter is 'B'"):
        Driver(engine).add("one", PROMPTS[0], 4, adapter="B")
    engine.close()


def test_other_files_of_the_same_directory_and_back(tmp_path: Path) -> None:
    """What was kept of prompts belongs to the files: those of the name's earlier files are not found."""
    engine = open_tiny(cache_entries=16)
    drive = Driver(engine)
    folder = tmp_path / "a"
    for turn, (source, cached) in enumerate((("A", 0), ("B", 0), ("A", len(LONG) - 1))):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(adapters("qwen3")[source], folder)
        if turn:
            with pytest.raises(LoadProblem, match="has one of this name with other files; drop it first"):
                engine.add_adapter("a", folder)
            engine.drop_adapter("a")
        engine.add_adapter("a", folder)
        drive.add("one", LONG, 8, adapter="a")
        drive.run()
        assert drive.cached["one"] == cached
        assert drive.tokens["one"] == wanted("qwen3", source, tuple(LONG), 8)
    engine.close()


def test_what_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    engine = open_tiny()
    drive = Driver(engine)
    drive.add("base", PROMPTS[0], 30)
    drive.until(drive.generated("base", 3))
    foreign = make_adapter(tmp_path / "foreign", model_directory("qwen3"), keys=["mlp.up_proj"])
    config = foreign / "adapter_config.json"
    config.write_text(config.read_text().replace("mlp.up_proj", "mlp.nothing"))
    for folder, words in ((tmp_path / "gone", "cannot read"), (foreign, "which is no module")):
        with pytest.raises(LoadProblem, match=f"adapter 'bad': .*{words}") as caught:
            engine.add_adapter("bad", folder)
        assert caught.value.code is ErrorCode.LOAD_FAILED
    assert names(engine) == []
    add(engine, "A")
    drive.run()
    assert drive.tokens["base"] == expected("qwen3", PROMPTS[0], 30)
    engine.close()


def test_an_adapter_that_the_model_cannot_compute_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.tuner.lora import LoRALinear

    engine = open_tiny()
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise ValueError("no such shape")

        patch.setattr(LoRALinear, "__call__", fail)
        with pytest.raises(LoadProblem, match="the model fails on its first token with it: no such shape"):
            add(engine, "A")
    assert names(engine) == []
    drive = Driver(engine)
    drive.add("base", PROMPTS[0], 8)
    drive.run()
    assert drive.tokens["base"] == expected("qwen3", PROMPTS[0], 8)
    add(engine, "A")
    engine.close()


def test_one_that_is_dropped_gives_its_memory_back() -> None:
    import mlx.core as mx

    engine = open_tiny(cache_entries=0)
    drive = Driver(engine)
    taken: list[int] = []
    for _ in range(3):
        add(engine, "A")
        for index in range(3):
            drive.add(f"{index}", PROMPTS[index], 12, adapter="A")
        drive.run()
        engine.drop_adapter("A")
        mx.synchronize()
        gc.collect()  # rows in reference cycles go at some time, and this is not about when
        taken.append(mx.get_active_memory())
    assert taken[2] <= taken[0]
    engine.close()


def test_no_more_than_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = open_tiny()
    engine._adapters._memory = limits.MIB  # less than the model has taken already
    with pytest.raises(LoadProblem, match=r"of the 1\.0 MiB that the model may take are in use") as caught:
        add(engine, "A")
    assert caught.value.code is ErrorCode.OUT_OF_MEMORY
    engine._adapters._memory = 0
    add(engine, "A")
    monkeypatch.setattr(limits, "MAX_ADAPTERS", 1)
    with pytest.raises(LoadProblem, match="the model has 1 adapters; the limit is 1"):
        add(engine, "B")
    engine.close()


@pytest.fixture(scope="module")
def worker(tiny_model: Path) -> Iterator[WorkerHarness]:
    import tempfile

    run_dir = tempfile.TemporaryDirectory(prefix="bh-", dir="/tmp")
    with run_dir as path, loaded_worker(Path(path), tiny_model) as worker:
        yield worker


def change(worker: WorkerHarness, command: AddAdapter | DropAdapter) -> AdaptersReply | Failed:
    """Send a change; what is answered under its id."""
    request_id = new_request_id()
    worker.send(command, request_id)
    answers: list[AdaptersReply | Failed] = []

    def look() -> bool:
        for frame in worker.control:
            if isinstance(frame.message, AdaptersReply) and frame.request_id == request_id:
                answers.append(frame.message)
        worker.control.clear()
        replies = worker._replies[request_id]
        while replies:
            answers.append(replies.popleft())  # pyright: ignore[reportArgumentType]
        return bool(answers)

    worker.until(look, what="the answer")
    worker.stats()
    look()
    assert len(answers) == 1, "answered exactly once"
    return answers[0]


def test_a_worker_with_a_stream(worker: WorkerHarness, tiny_model: Path, tmp_path: Path) -> None:
    folder = str(make_adapter(tmp_path / "a", tiny_model, seed=1))
    whole = worker.run(prompt=PROMPTS[0], max_tokens=200).tokens
    stream = worker.generate(prompt=PROMPTS[0], max_tokens=200)
    worker.first_tokens(stream, 3)
    reply = change(worker, AddAdapter(NAME, "a", folder))
    assert isinstance(reply, AdaptersReply), reply
    assert [(i.name, i.kind) for i in reply.adapters] == [("a", "lora")]
    with_it = worker.generate(prompt=PROMPTS[0], max_tokens=400, adapter="a")
    worker.first_tokens(with_it, 2)
    refused = change(worker, DropAdapter(NAME, "a"))
    assert isinstance(refused, Failed)
    assert refused.code == "bad_request"
    assert refused.message == "adapter 'a' serves a live request; drop it when they have ended, or cancel them"
    worker.cancel(with_it)
    assert worker.result(with_it).tokens[:3] != whole[:3]
    assert worker.result(stream).tokens == whole
    reply = change(worker, DropAdapter(NAME, "a"))
    assert isinstance(reply, AdaptersReply), reply
    assert reply.adapters == []
    failed = worker.run(prompt=PROMPTS[0], adapter="a").failed
    assert failed is not None
    assert "adapter is 'a', and the adapters of this model are none" in failed.message


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (AddAdapter(NAME, "x", "/nowhere"), "load_failed", "adapter 'x': cannot read /nowhere"),
        (AddAdapter("other", "x", "/nowhere"), "unknown_model", "this worker holds tiny, not 'other'"),
        (AddAdapter(NAME, "base", "/nowhere"), "bad_request", "name must not be 'base'"),
        (DropAdapter(NAME, "x"), "bad_request", "adapter is 'x', and the adapters of this model are none"),
    ],
    ids=str,
)
def test_a_worker_refuses(worker: WorkerHarness, command: AddAdapter | DropAdapter, code: str, words: str) -> None:
    failed = change(worker, command)
    assert isinstance(failed, Failed)
    assert failed.code == code
    assert words in failed.message
