"""The memory budget with real MLX: three tiny models, room for two, shares told from their files."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from mlx_bulkhead.orchestrator import sizes
from mlx_bulkhead.orchestrator.cli.app import run
from mlx_bulkhead.orchestrator.config import Config, ModelConfig, load_config
from mlx_bulkhead.orchestrator.embedded import Orchestrator
from mlx_bulkhead.orchestrator.memory_config import MemoryConfig
from mlx_bulkhead.protocol.limits import MIB
from mlx_bulkhead.protocol.values import ModelStatus, PlacementInfo

from .conftest import reference

PROMPT = "The river was"
JOB = [{"prompt": PROMPT, "max_tokens": 24}]


@pytest.mark.timeout(180)
async def test_three_models_with_room_for_two(short_tmp: Path, tiny_model: Path, tiny_llama: Path) -> None:
    twin = short_tmp / "twin"  # a directory of its own: two names for one are refused
    shutil.copytree(tiny_model, twin)
    models = {"qwen": tiny_model, "llama": tiny_llama, "twin": twin}
    config = Config(
        models={name: ModelConfig(str(path), context_limit=1024) for name, path in models.items()},
        memory=MemoryConfig(budget=330 * MIB, min_residency_s=0.0),
    )
    expected = {name: reference(path, JOB)[0]["text"] for name, path in models.items()}
    async with Orchestrator(config, run_dir=short_tmp / "r") as host:
        for name in ("qwen", "llama", "qwen", "twin", "llama", "qwen"):
            result = await host.complete(name, prompt=PROMPT, max_tokens=24)
            assert result.text == expected[name]
            seen = host.stats_reply(None).placement
            assert seen is not None
            caps = sum(_cap(status) for status in host.model_statuses())
            assert 0 < caps <= seen.held <= seen.budget
            for place in seen.places:
                if place.phase == "resident" and place.peak:
                    assert 0.8 <= place.predicted / place.peak <= 1.25
        assert {s.name: s.incarnation for s in host.model_statuses()} == {"qwen": 2, "llama": 2, "twin": 1}
        assert sum("granted" in words for words in seen.decisions) == 5


@pytest.mark.timeout(180)
async def test_of_a_group_one_at_a_time_and_others_beside_it(
    short_tmp: Path, tiny_model: Path, tiny_llama: Path
) -> None:
    """Requests for both models of the group at once: each is served, and they are never loaded together."""
    twin = short_tmp / "twin"
    shutil.copytree(tiny_model, twin)
    file = short_tmp / "bulkhead.toml"
    file.write_text(
        "[memory]\nmin_residency_s = 0\n[memory.groups.big]\nmax_loaded = 1\n"
        f'[models.qwen]\nmodel = "{tiny_model}"\ngroup = "big"\n'
        f'[models.twin]\nmodel = "{twin}"\ngroup = "big"\n'
        f'[models.llama]\nmodel = "{tiny_llama}"\n'
    )
    expected = {path: reference(path, JOB)[0]["text"] for path in (tiny_model, tiny_llama)}
    together: set[frozenset[str]] = set()

    async def ask(host: Orchestrator, name: str, path: Path) -> None:
        for _ in range(2):
            result = await host.complete(name, prompt=PROMPT, max_tokens=24)
            together.add(frozenset(status.name for status in host.model_statuses() if status.pid is not None))
            assert result.text == expected[path]

    async with Orchestrator(load_config(file), run_dir=short_tmp / "r") as host:
        asked = (("qwen", tiny_model), ("llama", tiny_llama), ("twin", tiny_model))
        await asyncio.gather(*(ask(host, name, path) for name, path in asked))
        seen = host.stats_reply(None).placement
        assert seen is not None
        assert seen.groups == {"big": 1}
        assert {place.name: place.group for place in seen.places} == {"llama": "", _of_the_group(seen): "big"}
        assert not any({"qwen", "twin"} <= names for names in together)
        assert {s.name: s.incarnation for s in host.model_statuses()}["llama"] == 1


def _of_the_group(seen: PlacementInfo) -> str:
    """The one model of the group that has a place."""
    (name,) = (place.name for place in seen.places if place.group)
    return name


def _cap(status: ModelStatus) -> int:
    return status.info.limits.memory_bytes if status.info is not None and status.pid is not None else 0


def test_plan_tells_what_fits_and_loads_nothing(
    tiny_model: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str], short_tmp: Path
) -> None:
    both = [str(tiny_model), str(tiny_llama)]
    options = ["--json", "--run-dir", str(short_tmp)]
    assert run(["plan", *both, "--budget", str(450 * MIB), *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["fits"] for one in told["models"]] == [True, True]
    assert told["models"][0]["weights"] == sizes.tensor_bytes(tiny_model, "model*.safetensors")
    assert run(["plan", *both, "--budget", str(300 * MIB), *options]) == 1
    assert [one["fits"] for one in json.loads(capsys.readouterr().out)["models"]] == [True, False]


def test_plan_keeps_to_the_bounds_of_groups(
    tiny_model: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str], short_tmp: Path
) -> None:
    file = short_tmp / "bulkhead.toml"
    text = f'[models.qwen]\nmodel = "{tiny_model}"\n%s[models.llama]\nmodel = "{tiny_llama}"\n%s'
    for bounds, group, key in (
        ("[memory.groups.big]\nmax_loaded = 1\n", 'group = "big"\n', "memory.groups.big.max_loaded"),
        ("[memory]\nmax_loaded = 1\n", "", "memory.max_loaded"),
    ):
        file.write_text(bounds + text % (group, group))
        assert run(["plan", "--config", str(file), "--json", "--run-dir", str(short_tmp)]) == 1
        first, second = json.loads(capsys.readouterr().out)["models"]
        assert (first["fits"], second["fits"]) == (True, False)
        assert second["note"] == f"{key} is 1: not beside the ones above"
