"""Owns the checks of the disk tier: warm restarts, damaged and foreign files, bounds, neighbours on one folder."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.worker.cache import disk_file, disk_tier, store
from mlx_bulkhead.worker.cache.prompt_cache import pack
from mlx_bulkhead.worker.engines.base import Engine

from .test_cache_engine import LONG as WHOLE
from .test_cache_engine import ask, cold
from .test_engine import CACHES, Driver, open_tiny

ROOM = 256 * 1024 * 1024
LONG = WHOLE[:300]


def opened(folder: Path, architecture: str = "qwen3", room: int = ROOM, **options: Any) -> Driver:
    engine = open_tiny(architecture, cache_entries=64, cache_disk_bytes=room, cache_dir=str(folder), **options)
    return Driver(engine)


def settle(engine: Engine) -> None:
    """Let an idle engine write what it has to."""
    until = time.monotonic() + 20
    while engine.tend():
        assert time.monotonic() < until


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


def filled(folder: Path, architecture: str = "qwen3") -> list[Path]:
    """A folder with what one request leaves."""
    drive = opened(folder, architecture)
    ask(drive, "first", LONG)
    settle(drive.engine)
    drive.engine.close()
    found = files(folder)
    assert found
    return found


@pytest.mark.parametrize("architecture", CACHES)
def test_a_restarted_worker_starts_warm(tmp_path: Path, architecture: str) -> None:
    filled(tmp_path, architecture)
    answer = cold(architecture, LONG, 12)
    second = [*LONG, *answer, 5, 6]
    drive = opened(tmp_path, architecture)
    assert ask(drive, "second", second) >= len(LONG) + 11
    assert drive.tokens["second"] == cold(architecture, second, 12)
    edited = [*LONG[:-5], 9, 9, 9]
    assert ask(drive, "edited", edited) >= len(LONG) - 17
    assert drive.tokens["edited"] == cold(architecture, edited, 12)
    stats = drive.engine.cache_stats()
    assert stats.disk_hits >= 1
    assert stats.disk_errors == 0
    drive.engine.close()


def test_a_crash_in_mid_answer_leaves_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "LATE_S", 0.0)
    drive = opened(tmp_path)
    drive.add("a", LONG, 400)
    drive.until(lambda: bool(files(tmp_path)) or len(drive.tokens["a"]) > 390)
    assert files(tmp_path)
    sent = drive.tokens["a"][:20]
    again = opened(tmp_path)  # the first is as good as dead
    again.add("a", LONG, 40, resume_tokens=sent)
    again.run()
    assert again.cached["a"] == len(LONG) - 1
    assert again.tokens["a"] == cold("qwen3", LONG, 40)
    drive.drop("a")
    drive.engine.close()
    again.engine.close()


def test_folders_and_files_are_the_users_own(tmp_path: Path) -> None:
    found = filled(tmp_path)
    assert stat.S_IMODE(found[0].parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(found[0].stat().st_mode) == 0o600
    assert [path for path in found[0].parent.iterdir() if path not in found] == []


def test_a_tenant_is_not_named_and_not_crossed(tmp_path: Path) -> None:
    drive = opened(tmp_path)
    ask(drive, "a", LONG, tenant="alice-in-wonderland")
    settle(drive.engine)
    drive.engine.close()
    assert all(b"alice" not in path.read_bytes() for path in files(tmp_path))
    drive = opened(tmp_path)
    assert ask(drive, "b", LONG, tenant="bob") == 0
    assert ask(drive, "a", LONG, tenant="alice-in-wonderland") == len(LONG) - 1
    drive.engine.close()


def test_a_longer_prefix_takes_the_place_of_a_shorter(tmp_path: Path) -> None:
    filled(tmp_path)
    drive = opened(tmp_path)
    ask(drive, "second", [*LONG, *cold("qwen3", LONG, 12), 5])
    settle(drive.engine)
    assert len(files(tmp_path)) == drive.engine.cache_stats().disk_entries == 1
    drive.engine.close()


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "longer":
        path.write_bytes(data + b"x")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "garbage":
        path.write_bytes(os.urandom(4096))
    elif how == "a bit of an array":
        data[-1000] ^= 1
        path.write_bytes(data)
    elif how == "a token":
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        tokens = header["__metadata__"]["tokens"]
        header["__metadata__"]["tokens"] = tokens[:-8] + "AAAA" + tokens[-4:]
        path.write_bytes(_with_header(header, data[8 + length :]))
    elif how == "another model":
        path.write_bytes(data.replace(path.parent.name.encode(), b"0" * len(path.parent.name), 1))
    elif how == "a header of lists":
        path.write_bytes(_with_header([[[1]]], b""))
    elif how == "a huge header":
        path.write_bytes((2**62).to_bytes(8, "little") + data[8:])
    else:
        path.write_bytes(_with_header({"__metadata__": {"format": disk_file.FORMAT}}, b""))


def _with_header(header: Any, rest: bytes | bytearray) -> bytes:
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + rest


@pytest.mark.parametrize(
    "how",
    [
        "truncated",
        "longer",
        "empty",
        "garbage",
        "a bit of an array",
        "a token",
        "another model",
        "a header of lists",
        "a huge header",
        "nothing but a format",
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_file_that_is_not_what_it_was_is_a_miss_and_goes(tmp_path: Path, how: str, when: str) -> None:
    [path] = filled(tmp_path)
    if when == "before":
        damage(path, how)
    drive = opened(tmp_path)
    if when == "after":  # it was known when it was damaged
        damage(path, how)
    assert ask(drive, "a", LONG) == 0
    assert drive.tokens["a"] == cold("qwen3", LONG, 12)
    stats = drive.engine.cache_stats()
    assert (stats.disk_hits, stats.disk_errors) == (0, 1)
    settle(drive.engine)
    assert ask(drive, "b", LONG) == len(LONG) - 1
    drive.engine.close()
    again = opened(tmp_path)  # and it was written anew
    assert ask(again, "a", LONG) == len(LONG) - 1
    assert again.engine.cache_stats().disk_errors == 0
    again.engine.close()


def test_the_states_of_another_model_are_not_taken(tmp_path: Path) -> None:
    """A file with the right key and checksum whose states do not fit, as only a fault of ours could make it."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    drive = opened(tmp_path)
    [key] = [path.name for path in tmp_path.iterdir()]
    tokens = pack(LONG)
    draft = disk_file.Draft(key, disk_tier._hash(""), tokens, True)
    for _ in range(4):
        layer = KVCache()
        layer.update_and_fetch(mx.zeros((1, 9, len(LONG), 8)), mx.zeros((1, 9, len(LONG), 8)))
        draft.add(layer)
    draft.write(tmp_path / key / disk_tier._name(draft.salt, tokens), draft.header())
    assert ask(drive, "a", LONG) == 0
    assert drive.engine.cache_stats().disk_errors == 1
    drive.engine.close()


def test_foreign_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    [path] = filled(tmp_path)
    other = path.with_name("notes.txt")
    other.write_text("mine")
    drive = opened(tmp_path)
    assert ask(drive, "a", LONG) == len(LONG) - 1
    drive.engine.close()
    assert other.read_text() == "mine"


def test_other_weights_are_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    from mlx_bulkhead.protocol.commands import Load
    from mlx_bulkhead.worker.engines.loader import open_engine

    from .test_engine import model_directory

    filled(tmp_path / "cache")
    copy = shutil.copytree(model_directory("qwen3"), tmp_path / "model")
    os.utime(copy / "model.safetensors", ns=(1, 1))
    load = Load(name="tiny", model=str(copy), cache_disk_bytes=ROOM, cache_dir=str(tmp_path / "cache"))
    drive = Driver(open_engine(load, lambda *_: None))
    assert ask(drive, "a", LONG) == 0
    drive.engine.close()
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_bytes_on_disk_are_bounded_and_the_oldest_goes_first(tmp_path: Path) -> None:
    [path] = filled(tmp_path)
    size = path.stat().st_size
    path.unlink()
    drive = opened(tmp_path, room=3 * size + size // 2)
    prompts = [[400 + number, *LONG[1:]] for number in range(6)]
    for number, prompt in enumerate(prompts):
        ask(drive, str(number), prompt)
        settle(drive.engine)
        assert drive.engine.cache_stats().disk_bytes <= 3 * size + size // 2
    assert len(files(tmp_path)) == 3
    drive.engine.close()
    again = opened(tmp_path, room=3 * size + size // 2)
    assert [ask(again, f"{n}", prompt, cache=True) > 0 for n, prompt in enumerate(prompts[::-1])][:3] == [True] * 3
    again.engine.close()


def test_a_prefix_over_the_whole_bound_removes_nothing(tmp_path: Path) -> None:
    [path] = filled(tmp_path)
    drive = opened(tmp_path, room=path.stat().st_size + 1000)
    ask(drive, "a", [*LONG[::-1], *LONG])
    settle(drive.engine)
    assert files(tmp_path) == [path]
    assert drive.engine.cache_stats().disk_errors == 0
    drive.engine.close()


def test_a_full_disk_is_counted_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = opened(tmp_path)

    def full(self: disk_file.Draft, path: Path, header: bytes) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_file.Draft, "write", full)
    ask(drive, "a", LONG)
    settle(drive.engine)
    assert drive.engine.cache_stats().disk_errors == 1
    assert not any(tmp_path.glob("*/*"))
    assert not any(tmp_path.glob("*/.*"))
    assert ask(drive, "b", LONG) == len(LONG) - 1  # memory has it
    monkeypatch.undo()
    ask(drive, "c", [5, *LONG])
    settle(drive.engine)
    assert len(files(tmp_path)) == 1
    drive.engine.close()


def test_a_folder_that_cannot_be_made_is_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    drive = opened(tmp_path / "file" / "cache")
    assert ask(drive, "a", LONG) == 0
    assert ask(drive, "b", LONG) == len(LONG) - 1
    assert drive.engine.cache_stats().disk_errors == 1
    drive.engine.close()


def test_a_folder_that_vanishes_is_no_end(tmp_path: Path) -> None:
    import shutil

    drive = opened(tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    ask(drive, "a", LONG)
    settle(drive.engine)
    assert ask(drive, "b", LONG) == len(LONG) - 1
    assert drive.engine.cache_stats().disk_errors > 0
    drive.engine.close()


def test_two_workers_on_one_folder(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    ask(one, "a", LONG)
    settle(one.engine)
    assert ask(two, "a", LONG) == len(LONG) - 1  # written after it had looked into the folder
    other = [5, *LONG]
    for drive in (one, two):
        ask(drive, "b", other)
    settle(one.engine)
    settle(two.engine)
    for path in files(tmp_path):
        path.unlink()
    one.engine.close(), two.engine.close()
    three = opened(tmp_path)
    assert ask(three, "a", LONG) == 0
    assert three.engine.cache_stats().disk_errors == 0
    three.engine.close()


def test_a_file_that_goes_in_the_moment_of_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [path] = filled(tmp_path)
    drive = opened(tmp_path)
    real = disk_tier.DiskTier.read

    def late(self: Any, name: str) -> Any:
        path.unlink()
        return real(self, name)

    monkeypatch.setattr(disk_tier.DiskTier, "read", late)
    assert ask(drive, "a", LONG) == 0
    assert drive.engine.cache_stats().disk_errors == 0
    drive.engine.close()


def test_what_is_pending_is_bounded_and_written_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CLOSE_S", 20.0)
    drive = opened(tmp_path)
    for number in range(12):
        ask(drive, str(number), [400 + number, *LONG[:60]], 2)
    drive.engine.close()
    assert len(files(tmp_path)) == disk_tier.MOST_PENDING


def test_leftovers_of_a_worker_that_died_are_removed(tmp_path: Path) -> None:
    [path] = filled(tmp_path)
    old, young = path.with_name(".old.1.1.part"), path.with_name(".young.1.1.part")
    for leftover in (old, young):
        leftover.write_bytes(b"half")
    os.utime(old, (1, 1))
    opened(tmp_path).engine.close()
    assert not old.exists()
    assert young.exists()


def test_short_prompts_make_no_files(tmp_path: Path) -> None:
    drive = opened(tmp_path)
    ask(drive, "a", LONG[:10], 5)
    settle(drive.engine)
    assert files(tmp_path) == []
    drive.engine.close()


def test_bfloat16_comes_back_bit_for_bit(tmp_path: Path) -> None:
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    values = mx.random.normal((1, 2, 50, 4), key=mx.random.key(1)).astype(mx.bfloat16)
    made = [KVCache(), RotatingKVCache(16)]
    draft = disk_file.Draft("key", "salt", b"\1\0\0\0", False)
    for layer in made:
        layer.update_and_fetch(values, values)
        draft.add(layer)
    header = draft.header()
    draft.write(tmp_path / "file", header)
    assert (tmp_path / "file").stat().st_size == len(header) + draft.size
    back: list[Any] = [KVCache(), RotatingKVCache(1)]
    disk_file.read_into(tmp_path / "file", back)
    for before, after in zip(made, back, strict=True):
        assert mx.array_equal(before.keys, after.keys)
        assert after.keys.dtype == mx.bfloat16
        assert after.offset == 50
    assert (back[1].max_size, back[1]._idx) == (16, made[1]._idx)
    with pytest.raises(disk_file.BadFile):
        disk_file.read_into(tmp_path / "file", [KVCache(), KVCache()])
    assert mx.load(str(tmp_path / "file"), format="safetensors")  # any reader of the format can look at it
