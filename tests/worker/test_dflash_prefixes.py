"""Prefixes that DFlash keeps: they serve later prompts, in memory and on disk, and change no text."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.support.speculation import ARCHITECTURES, Hand, open_pair

from .test_engine import PROMPTS

PROMPT = PROMPTS[2] * 2
"""Longer than the window of the windowed model."""


def serve(engine: Any, name: str, prompt: str, **options: Any) -> Hand:
    hand = Hand(engine)
    hand.insert(name, prompt, max_tokens=12, **options)
    hand.finish_all()
    assert engine.served(name.encode()).engine == "dflash"
    return hand


def hit(hand: Hand) -> int:
    return max((out.cached for out in hand.prefills), default=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prompt_again_and_a_longer_one_use_what_is_kept(architecture: str) -> None:
    engine = open_pair(architecture, cache_entries=4, verify_mode="dflash")
    try:
        cold = serve(engine, "cold", PROMPT)
        assert hit(cold) == 0
        again = serve(engine, "again", PROMPT)
        assert again.tokens["again"] == cold.tokens["cold"]
        longer = Hand(engine)
        tokens = [*cold.ids["cold"], *range(300, 400)]
        longer.insert("longer", None, tokens=tokens, max_tokens=12)
        longer.finish_all()
        assert engine.speculation_stats().cache.hits == 2
        assert engine.speculation_stats().cache.tokens_reused > len(cold.ids["cold"])
        for hand in (cold, again, longer):
            hand.check(architecture)
        assert hit(again) > 0
        assert hit(longer) > 0
    finally:
        engine.close()


def test_prompt_and_answer_serve_the_next_turn() -> None:
    engine = open_pair("qwen3", cache_entries=4, verify_mode="dflash")
    try:
        first = serve(engine, "first", PROMPT)
        engine.tend()
        tokens = [*first.ids["first"], *first.tokens["first"], 300, 301, 302]
        hand = Hand(engine)
        hand.insert("next", None, tokens=tokens, max_tokens=8)
        hand.finish_all()
        hand.check("qwen3")
        assert hit(hand) == len(tokens) - 3
    finally:
        engine.close()


def test_tenants_share_nothing() -> None:
    engine = open_pair("qwen3", cache_entries=4)
    try:
        serve(engine, "a", PROMPT, tenant="a")
        assert hit(serve(engine, "b", PROMPT, tenant="b")) == 0
        assert hit(serve(engine, "a again", PROMPT, tenant="a")) > 0
        assert hit(serve(engine, "uncached", PROMPT, tenant="a", cache=False)) == 0
    finally:
        engine.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefixes_on_disk_outlive_the_worker(architecture: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache_entries": 4, "disk_bytes": 2**30, "verify_mode": "dflash"}
    load = {"cache_dir": str(tmp_path), "cache_disk_bytes": 2**30, "cache_entries": 4}
    engine = open_pair(architecture, load=load, **options)
    cold = serve(engine, "cold", PROMPT)
    engine.close()
    [folder] = tmp_path.glob("dflash-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.rglob("*.safetensors"))
    engine = open_pair(architecture, load=load, **options)
    try:
        warm = serve(engine, "warm", PROMPT)
        assert warm.tokens["warm"] == cold.tokens["cold"]
        assert engine.speculation_stats().cache.disk_hits == 1
        assert hit(warm) > 0
    finally:
        engine.close()


def test_a_damaged_file_is_a_miss(tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache_entries": 4, "disk_bytes": 2**30}
    load = {"cache_dir": str(tmp_path), "cache_disk_bytes": 2**30, "cache_entries": 4}
    engine = open_pair("qwen3", load=load, **options)
    serve(engine, "cold", PROMPT)
    engine.close()
    for file in tmp_path.rglob("dflash-*/**/*.safetensors"):
        os.truncate(file, 100)
    engine = open_pair("qwen3", load=load, **options)
    try:
        hand = serve(engine, "again", PROMPT)
        hand.check("qwen3")
        assert hit(hand) == 0
    finally:
        engine.close()


def test_a_folder_that_cannot_be_used_leaves_the_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    load = {"cache_dir": str(tmp_path / "file"), "cache_disk_bytes": 2**20, "cache_entries": 4}
    engine = open_pair("qwen3", load=load, cache_entries=4, disk_bytes=2**30)
    try:
        serve(engine, "one", PROMPT)
        assert hit(serve(engine, "two", PROMPT)) > 0
        assert engine.speculation_stats().cache.disk_errors == 1
    finally:
        engine.close()


def test_prefixes_count_in_the_workers_budget_and_give_way() -> None:
    engine = open_pair("qwen3", cache_entries=4)
    try:
        serve(engine, "a", PROMPT)
        engine.tend()
        (holder,) = engine.keeper.holders  # the text engine keeps none here
        kept = engine.speculation_stats().cache
        assert len(holder) == kept.entries > 0
        assert holder.nbytes == kept.bytes > 0
        holder.drop_oldest()
        assert len(holder) == holder.nbytes == 0
        assert hit(serve(engine, "again", PROMPT)) == 0
    finally:
        engine.close()
