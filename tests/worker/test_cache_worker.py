"""Owns the checks of the prompt cache through a worker's socket: figures of requests, statistics, a kill."""

from __future__ import annotations

from pathlib import Path

from tests.support.worker_harness import loaded_worker

PROMPT = list(range(300, 500))


def test_figures_tell_what_was_reused(short_tmp: Path, tiny_model: Path) -> None:
    with loaded_worker(short_tmp, tiny_model) as worker:
        first = worker.run(tokens=PROMPT, max_tokens=10)
        second = worker.run(tokens=PROMPT, max_tokens=10)
        other = worker.run(tokens=PROMPT, max_tokens=10, tenant="other")
        outside = worker.run(tokens=PROMPT, max_tokens=10, cache=False)
        for outcome, cached in ((first, 0), (second, 199), (other, 0), (outside, 0)):
            assert outcome.done is not None
            assert outcome.tokens == first.tokens
            usage, timings = outcome.done.usage, outcome.done.timings
            assert (usage.prompt_tokens, usage.cached_tokens) == (200, cached)
            assert (timings.prompt_n, timings.cache_n) == (200 - cached, cached)
        stats = worker.until_stats(lambda stats: stats.cache.misses == 2)
        assert (stats.cache.hits, stats.cache.tokens_reused, stats.cache.entries) == (1, 199, 2)
        assert stats.cache.bytes > 0
        assert stats.prompt_tokens == 601


def test_rows_in_company_have_figures_of_their_own(short_tmp: Path, tiny_model: Path) -> None:
    with loaded_worker(short_tmp, tiny_model) as worker:
        worker.run(tokens=PROMPT, max_tokens=10)
        prompts = [PROMPT, [*PROMPT[:150], 7], [9, *PROMPT]]
        ids = [worker.generate(tokens=prompt, max_tokens=30) for prompt in prompts]
        found = [worker.result(request_id).done for request_id in ids]
        assert [done and done.usage.cached_tokens for done in found] == [199, 150, 0]
        assert [done and done.timings.prompt_n for done in found] == [1, 1, 201]


def test_a_worker_that_was_killed_starts_warm(short_tmp: Path, tiny_model: Path) -> None:
    options = {"cache_disk_bytes": 2**28, "cache_dir": str(short_tmp / "prompts")}
    (short_tmp / "one").mkdir()
    (short_tmp / "two").mkdir()
    with loaded_worker(short_tmp / "one", tiny_model, **options) as worker:
        first = worker.run(tokens=PROMPT, max_tokens=10)
        stats = worker.until_stats(lambda stats: stats.cache.disk_entries == 1)
        assert stats.phase == "idle"
        assert stats.cache.disk_bytes > 0
        worker.process.kill()
    with loaded_worker(short_tmp / "two", tiny_model, **options) as worker:
        again = worker.run(tokens=PROMPT, max_tokens=40, resume_tokens=first.tokens[:5])
        assert again.tokens[:5] == first.tokens[5:]
        assert again.done is not None
        assert again.done.usage.cached_tokens == 200
        assert again.done.timings.cache_n == 204
        assert worker.until_stats(lambda stats: stats.cache.disk_hits == 1).cache.disk_errors == 0
