"""The search for leaks finds each kind of leak, and nothing when there is none."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

from tests.support import leaks


def test_nothing_is_found_where_nothing_is_left() -> None:
    assert leaks.find(leaks.take(), within_s=0) == []


def test_a_child_that_is_left_is_found_and_can_be_ended() -> None:
    before = leaks.take()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        left = leaks.find(before, within_s=0)
        assert any(line.startswith(f"child process {child.pid}:") for line in left)
        leaks.end_children(before)
    assert leaks.find(before) == []


def test_a_child_that_is_about_to_end_is_waited_for() -> None:
    before = leaks.take()
    with subprocess.Popen([sys.executable, "-c", ""]):
        assert leaks.find(before) == []


def test_a_thread_that_is_left_is_found() -> None:
    before = leaks.take()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="lingering")
    thread.start()
    assert leaks.find(before, within_s=0) == ["thread lingering"]
    done.set()
    assert leaks.find(before) == []


def test_a_descriptor_that_is_left_is_found() -> None:
    before = leaks.take()
    read, write = os.pipe()
    assert [line.split(":")[0] for line in leaks.find(before, within_s=0)] == [
        f"descriptor {fd}" for fd in sorted((read, write))
    ]
    os.close(read)
    os.close(write)
    assert leaks.find(before, within_s=0) == []


def test_a_held_run_directory_is_found(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with open(run_dir / "lock", "w") as lock:
        assert leaks.find_run_dirs(tmp_path, within_s=0) == []
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert leaks.find_run_dirs(tmp_path, within_s=0) == [f"run directory {run_dir}"]
    assert leaks.find_run_dirs(tmp_path, within_s=0) == []
