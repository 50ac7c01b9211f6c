"""`[memory]`: what cannot work is refused at start, with the key, the value and the remedy."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.orchestrator import host_memory
from mlx_bulkhead.orchestrator.cli.serve import serve
from mlx_bulkhead.orchestrator.config import Config, ConfigError, ModelConfig, load_config
from mlx_bulkhead.orchestrator.memory_config import MemoryConfig
from mlx_bulkhead.orchestrator.placement import Placement
from mlx_bulkhead.orchestrator.policy.ladder import Lines
from mlx_bulkhead.orchestrator.policy.placement_values import Pressure
from mlx_bulkhead.protocol.exit_codes import CliExit

from .test_prediction import write

GIB = 2**30


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "total", lambda: 64 * GIB)


def read(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "bulkhead.toml"
    file.write_text(text, encoding="utf-8")
    return load_config(file)


def refusal(tmp_path: Path, text: str) -> str:
    """What a start with this file is refused with."""
    with pytest.raises(ConfigError) as caught:
        Placement(read(tmp_path, text))
    return caught.value.message


def test_all_of_it_is_read(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """
        [memory]
        budget = 17179869184
        max_loaded = 3
        ttl_s = 600
        min_residency_s = 5
        queue_s = 30
        working_context = 8192
        host_pressure = false
        drain_at = 0
        kill_at = 1.1
        [models.a]
        model = "org/a"
        pin = true
        ttl_s = 60
        """,
    )
    memory = config.memory
    assert memory.rules(0).budget == 16 * GIB
    assert memory.lines() == Lines(drain=0, kill=1.1)
    assert (config.models["a"].pin, config.models["a"].ttl_s) == (True, 60)


def test_without_it_nothing_is_active_and_nothing_enforced() -> None:
    placement = Placement(Config())
    assert not placement.active
    assert placement.lines is None
    assert placement.view() is None


def test_auto_is_most_of_what_models_can_have(tmp_path: Path) -> None:
    config = read(tmp_path, '[memory]\nbudget = "auto"')
    assert Placement(config).rules.budget == host_memory.usable()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[memory]\nbudget = 0", "memory.budget is 0: it must be bytes, 1048576 (1 MiB) or more"),
        ("[memory]\nbudget = -5", "memory.budget is -5"),
        ('[memory]\nbudget = "lots"', "memory.budget is 'lots'"),
        ("[memory]\nbudget = 137438953472", "memory.budget is 128.00 GiB, but this machine has 64.00 GiB"),
        ("[memory]\nttl_s = 0", "memory.ttl_s is 0: it must be 0.01 to 31536000 seconds; leave it out to keep idle"),
        ("[memory]\nttl_s = nan", "memory.ttl_s is nan"),
        ("[memory]\nqueue_s = 0", "memory.queue_s is 0: it must be 0.01 to 86400 seconds"),
        ("[memory]\nmin_residency_s = -1", "memory.min_residency_s is -1"),
        ("[memory]\nmax_loaded = 0", "memory.max_loaded is 0"),
        ("[memory]\nworking_context = 1", "memory.working_context is 1"),
        ("[memory]\ndrain_at = 1.5", "memory.drain_at is 1.5: it must be 0.5 to 1, or 0 for never"),
        ("[memory]\nkill_at = 0.9", "memory.kill_at is 0.9: it must be 0.95 to 2, or 0 for never"),
        ('[models.a]\nmodel = "x"\nttl_s = 0', "models.a.ttl_s is 0"),
        ("[memory]\nbudgett = 1", "did you mean 'budget'?"),
        ("[memory]\nqueue_s = 5", "memory.queue_s is of no use without memory.budget, memory.max_loaded or"),
        ("[memory.groups.big]\nmax_loaded = 0", "memory.groups.big.max_loaded is 0: it must be 1 or more"),
        ("[memory.groups.big]\n", "memory.groups.big.max_loaded is missing"),
        ("[memory]\ngroups = 5", "memory.groups is 5: it must hold tables, [memory.groups.NAME]"),
        ("[memory.groups.big]\nmax_loaded = 1\nttl_s = 5", "unknown key memory.groups.big.ttl_s"),
        ("[memory.groups.big]\nmax_loaded = 1", "memory.groups.big is of no use: no model names it"),
        ("[memory]\nttl_s = 5\nmin_residency_s = 5", "memory.min_residency_s is of no use without"),
        (
            "[memory]\nmax_loaded = 2\nworking_context = 999",
            "memory.working_context is of no use without",
        ),
        (
            "[memory]\nmax_loaded = 2\nkill_at = 1.1",
            "kill_at is of no use without memory.budget or memory.enforce",
        ),
        (
            '[models.a]\nmodel = "x"\npin = true',
            "models.a.pin is of no use without memory.budget",
        ),
    ],
)
def test_values_out_of_range(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(tmp_path, text)


GROUPED = """
[memory.groups.big]
max_loaded = 1
[models.a]
model = "org/a"
group = "big"
{a}
[models.b]
model = "org/b"
group = "{group}"
{b}
"""


def test_groups_are_read_and_make_placement_active(tmp_path: Path) -> None:
    placement = Placement(read(tmp_path, GROUPED.format(a="pin = false", b="", group="big")))
    assert placement.active
    assert placement.rules.groups == {"big": 1}
    assert not placement.budgeted
    assert placement.counts("a")
    assert not placement.counts("other")


@pytest.mark.parametrize(
    ("a", "b", "group", "words"),
    [
        ("", "", "bigg", "models.b.group is 'bigg': there is no [memory.groups.bigg] (did you mean 'big'?)"),
        ("pin = true", "pin = true", "big", "big.max_loaded is 1, but 2 of its models have pin: a, b"),
        ("preload = true", "preload = true", "big", "big.max_loaded is 1, but 2 of its models have preload: a, b"),
        (
            "pin = true",
            "",
            "big",
            "models.b could never be loaded: memory.groups.big.max_loaded is 1, and a is pinned",
        ),
    ],
)
def test_groups_that_cannot_work(tmp_path: Path, a: str, b: str, group: str, words: str) -> None:
    assert words in refusal(tmp_path, GROUPED.format(a=a, b=b, group=group))


def test_pins_beyond_max_loaded(tmp_path: Path) -> None:
    text = '[memory]\nmax_loaded = 1\n[models.a]\nmodel = "org/a"\npin = true\n[models.b]\nmodel = "org/b"\n'
    assert "models.b could never be loaded: memory.max_loaded is 1, and a is pinned" in refusal(tmp_path, text)
    assert "memory.max_loaded is 1, but 2 of its models have pin" in refusal(tmp_path, text + "pin = true")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A configuration with `small` and `large`, whose tensors take 1 and 64 MiB."""
    write(tmp_path / "small", {"a": 2**20})
    write(tmp_path / "large", {"a": 2**26})
    return tmp_path


def test_a_model_larger_than_the_budget(models: Path) -> None:
    words = refusal(models, '[memory]\nbudget = 209715200\n[models.large]\nmodel = "./large"')
    assert "models.large needs 225 MiB, but memory.budget is 200 MiB" in words


def test_pins_that_cannot_all_fit_and_one_that_leaves_no_room_for_another(models: Path) -> None:
    two = (
        '[memory]\nbudget = 314572800\n[models.large]\nmodel = "./large"\npin = true\n'
        '[models.small]\nmodel = "./small"\n'
    )
    words = refusal(models, two + "pin = true")
    assert "the pinned models need 352 MiB (large 225 MiB, small 127 MiB), but memory.budget is 300 MiB" in words
    words = refusal(models, two)
    assert "models.small needs 127 MiB, but memory.budget is 300 MiB, of which pinned models take 225 MiB" in words


def test_preloads_that_cannot_all_fit(models: Path) -> None:
    text = (
        '[memory]\nbudget = 314572800\n[models.large]\nmodel = "./large"\npreload = true\n'
        '[models.small]\nmodel = "./small"\npreload = true\n'
    )
    assert "models with preload need 352 MiB (large 225 MiB, small 127 MiB)" in refusal(models, text)


def test_two_names_for_one_directory(models: Path) -> None:
    (models / "link").symlink_to(models / "small")
    names = '[models.a]\nmodel = "./small"\n[models.b]\nmodel = "./link"'
    words = refusal(models, f"[memory]\nbudget = 1073741824\n{names}")
    assert "models.a and models.b are the same directory" in words
    Placement(read(models, names))  # without a budget it costs nobody anything


def test_a_limit_below_the_weights(models: Path) -> None:
    text = '[memory]\nbudget = 1073741824\n[models.large]\nmodel = "./large"\nmemory_limit = 33554432'
    assert "models.large: its weights take 64 MiB, and its memory_limit is 32 MiB" in refusal(models, text)


def test_a_model_that_is_not_there_is_left_to_its_load() -> None:
    Placement(Config(models={"a": ModelConfig("org/none")}, memory=MemoryConfig(budget=GIB)))


@pytest.mark.parametrize(
    ("some", "full", "level"),
    [
        (0.0, 0.0, Pressure.NORMAL),
        (9.9, 4.9, Pressure.NORMAL),
        (10.0, 0.0, Pressure.WARN),
        (60.0, 5.0, Pressure.CRITICAL),
    ],
)
def test_the_pressure_that_linux_tells(some: float, full: float, level: Pressure) -> None:
    text = (
        f"some avg10={some:.2f} avg60=0.00 avg300=0.00 total=123\n"
        f"full avg10={full:.2f} avg60=0.00 avg300=0.00 total=45\n"
    )
    assert host_memory.psi_level(text) is level


@pytest.mark.parametrize("text", ["", "some", "some avg10=x", "\0"])
def test_junk_is_no_pressure(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "memory"
    file.write_text(text)
    monkeypatch.setattr(host_memory, "PSI", file)
    assert host_memory.pressure() is Pressure.NORMAL
    monkeypatch.setattr(host_memory, "PSI", tmp_path / "none")
    assert host_memory.pressure() is Pressure.NORMAL
    assert "tells no memory pressure" in host_memory.unsupported()


class FakeMac:
    """The two calls of macOS's C library, as its headers describe them."""

    def __init__(self, level: int, footprint: int, fails: bool = False) -> None:
        self._level, self._footprint, self._fails = level, footprint, fails

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: None, new_size: Any) -> int:
        assert name == b"kern.memorystatus_vm_pressure_level"
        value._obj.value = self._level
        return -1 if self._fails else 0

    def proc_pid_rusage(self, pid: int, flavour: int, buffer: Any) -> int:
        assert (pid, flavour) == (77, 4)
        ctypes.c_uint64.from_buffer(buffer._obj, 16 + 7 * 8).value = self._footprint
        return -1 if self._fails else 0


@pytest.mark.parametrize(
    ("mac", "level", "footprint"),
    [
        (FakeMac(1, 5 * GIB), Pressure.NORMAL, 5 * GIB),
        (FakeMac(2, 0), Pressure.WARN, 0),
        (FakeMac(4, 1), Pressure.CRITICAL, 1),
        (FakeMac(3, 1), Pressure.NORMAL, 1),
        (FakeMac(4, 9, fails=True), Pressure.NORMAL, 0),
        (object(), Pressure.NORMAL, 0),  # a library without them
    ],
)
def test_the_calls_of_macos(mac: object, level: Pressure, footprint: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.sys, "platform", "darwin")
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: mac)
    assert host_memory.pressure() is level
    assert host_memory.footprint(77) == footprint
    assert host_memory.unsupported() == ""


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    machine = host_memory.total()
    (tmp_path / "max").write_text("1073741824\n")
    monkeypatch.setattr(host_memory, "CGROUP_MAX", tmp_path / "max")
    assert host_memory.total() == min(machine, GIB)
    (tmp_path / "max").write_text("max\n")
    assert host_memory.total() >= machine


def test_a_daemon_that_cannot_work_says_so_and_ends(models: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (models / "bulkhead.toml").write_text('[memory]\nbudget = 209715200\n[models.large]\nmodel = "./large"')
    assert serve(models / "bulkhead.toml", models / "run") == CliExit.USAGE
    assert capfd.readouterr().err.startswith("error: models.large needs 225 MiB, but memory.budget is 200 MiB")
