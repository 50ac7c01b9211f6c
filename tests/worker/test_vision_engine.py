"""Vision models of six families: greedy tokens are mlx-vlm's, alone, in company, from the cache, after a resume."""

from __future__ import annotations

import atexit
import io
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.protocol.commands import Generate, Load
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.values import ChatMessage, Part
from mlx_bulkhead.worker.engines.base import Engine, PrefillOut, Refused, RowFailed, TokenOut
from PIL import Image

from tests.support.tiny_vlms import FAMILIES, make_tiny_vlm

TOKENS = 16


def png(picture: Image.Image) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


@cache
def picture(name: str) -> Image.Image:
    """`red` and `blue` differ everywhere; `dot` differs from `red` in a few pixels."""
    made = Image.new("RGB", (80, 60), {"blue": (0, 60, 255)}.get(name, (255, 0, 0)))
    if name == "dot":
        made.paste((0, 255, 0), (20, 20, 44, 44))
    return made


@cache
def vlm_directory(family: str) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="bh-vlm-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return make_tiny_vlm(directory / family, family=family)


def open_vlm(family: str = "qwen2_vl", **options: Any) -> Engine:
    from mlx_bulkhead.worker.engines.loader import open_engine

    options.setdefault("cache_entries", 0)
    load = Load(name="tiny", model=str(vlm_directory(family)), **options)
    return open_engine(load, lambda phase, done, total: None)


@cache
def shared_vlm(family: str = "qwen2_vl") -> Engine:
    return open_vlm(family)


def ask(text: str, *names: str, **fields: Any) -> Generate:
    images = [Part("image", data=png(picture(name))) for name in names]
    fields.setdefault("max_tokens", TOKENS)
    return Generate("tiny", messages=[ChatMessage("user", text)], images=images, **fields)


def play(engine: Engine, *requests: Generate) -> list[list[int]]:
    """Serve requests together, to their ends."""
    rows: dict[bytes, list[int]] = {}
    for index, request in enumerate(requests):
        prepared = engine.prepare(bytes([index]) * 16, request)
        rows[prepared.row.request_id] = []
        engine.insert(prepared.row)
    while engine.busy:
        for out in engine.step():
            assert not isinstance(out, RowFailed), out
            if isinstance(out, TokenOut):
                rows[out.request_id].append(out.token)
    return list(rows.values())


@cache
def expected(family: str, text: str, *names: str) -> tuple[int, ...]:
    """mlx-vlm's own greedy tokens."""
    from mlx_vlm import load, stream_generate
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # its thread would count as a leak
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gemma 4's processor warns about sound
        model, processor = load(str(vlm_directory(family)))
    renderer: Any = processor if getattr(processor, "chat_template", None) else processor.tokenizer
    parts = [*({"type": "image"} for _ in names), {"type": "text", "text": text}]
    prompt = renderer.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    pictures: Any = [picture(name) for name in names]
    results = stream_generate(model, processor, prompt, pictures, max_tokens=TOKENS, temperature=0.0)
    return tuple(int(result.token) for result in results)[:TOKENS]  # type: ignore[arg-type]


STEPPED = ("gemma3", "gemma4", "qwen3_5")
"""Their caches cannot be cut back: they serve a prompt from a checkpoint only."""
BATCHED = tuple(family for family in FAMILIES if family != "qwen3_5")

CASES: tuple[tuple[str, ...], ...] = (
    ("What is this?", "red"),
    ("What is this?", "blue"),
    ("What is this?", "dot"),
    ("Which is larger?", "red", "blue"),
    ("Please describe the weather.",),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_the_library(family: str) -> None:
    found = [tuple(play(shared_vlm(family), ask(*case))[0]) for case in CASES]
    assert found == [expected(family, *case) for case in CASES]
    assert len(set(found)) >= len(CASES) - 1  # a random model may have the same to say about `red` and `dot`


@pytest.mark.parametrize("family", FAMILIES)
def test_the_right_pixels_reach_the_model(family: str) -> None:
    """Its embeddings differ when the picture does, also in a few pixels, and are equal when it is copied."""
    import mlx.core as mx

    engine: Any = shared_vlm(family)
    sight = engine._base._facts.sight
    embeds = [
        sight._look(engine.prepare(b"l" * 16, ask("What is this?", name)).row.media).embeds
        for name in ("red", "red", "dot", "blue")
    ]
    assert mx.array_equal(embeds[0], embeds[1])
    assert not any(mx.allclose(embeds[0], other).item() for other in embeds[2:])


@pytest.mark.parametrize("family", BATCHED)
def test_pictures_and_text_together_are_as_alone(family: str) -> None:
    """Four requests with pictures and four without, in a batch."""
    cases = [CASES[0], CASES[4], CASES[1], ("total",), CASES[2], ("1234",), CASES[3], ("river " * 40,)]
    engine = shared_vlm(family)
    together = play(engine, *(ask(*case) for case in cases))
    assert engine.served(bytes(16)).engine == "vision_batch"
    assert together == [play(engine, ask(*case))[0] for case in cases]
    assert engine.served(bytes(16)).engine == "vision"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_cache_knows_pictures_by_content(family: str) -> None:
    engine = open_vlm(family, cache_entries=16)
    try:
        first = play(engine, ask("What is this?", "red"))
        prefix = engine.prepare(b"x" * 16, ask("Which colour?", "red")).row
        media = prefix.media
        hit = _cached(engine, ask("Which colour?", "red"))
        if family in STEPPED:
            assert _cached(engine, ask("What is this?", "red")) > media.end
        else:
            assert hit >= media.end
            assert play(engine, ask("What is this?", "red")) == first
        assert _cached(engine, ask("What is this?", "dot")) < media.end
        assert _cached(engine, ask("What is this?", "red", tenant="other")) == 0
        assert tuple(play(engine, ask("What is this?", "red"))[0]) == expected(family, "What is this?", "red")
        assert tuple(play(engine, ask("What is this?", "dot"))[0]) == expected(family, "What is this?", "dot")
    finally:
        engine.close()


def _cached(engine: Engine, request: Generate) -> int:
    """Tokens of a request's prompt that come from the cache."""
    row = engine.prepare(b"c" * 16, request).row
    engine.insert(row)
    found = 0
    while engine.busy:
        for out in engine.step():
            if isinstance(out, PrefillOut):
                found = out.cached
    return found


def test_a_longer_chat_finds_the_first_picture() -> None:
    engine = open_vlm(cache_entries=16)
    try:
        play(engine, ask("What is this?", "red"))
        one = [Part("image", data=png(picture("red"))), Part("text", "What is this?")]
        more = [Part("image", data=png(picture("blue"))), Part("text", "And this?")]
        chat = [ChatMessage("user", one), ChatMessage("assistant", "red"), ChatMessage("user", more)]
        request = Generate("tiny", messages=chat, max_tokens=TOKENS)
        end = engine.prepare(b"y" * 16, ask("What is this?", "red")).row.media.end
        assert _cached(engine, request) > end
        assert play(engine, request) == play(shared_vlm(), request)
    finally:
        engine.close()


def test_a_hit_does_not_look_at_the_picture_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = open_vlm(cache_entries=16)
    try:
        play(engine, ask("What is this?", "red"))
        sight = engine._base._facts.sight
        looks: list[Any] = []
        monkeypatch.setattr(type(sight), "_look", lambda self, media: looks.append(media))
        assert len(play(engine, ask("Which colour?", "red"))[0]) == TOKENS
        assert not looks
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "gemma4", "qwen3_5"])
def test_a_resumed_answer_goes_on(family: str) -> None:
    engine = shared_vlm(family)
    whole = play(engine, ask("What is this?", "red"))[0]
    rest = play(engine, ask("What is this?", "red", resume_tokens=whole[:7]))[0]
    assert rest == whole[7:]


@pytest.mark.parametrize("options", [{"temperature": 0.9, "seed": 7}, {"repetition_penalty": 1.3}])
def test_sampling_is_that_of_text(options: dict[str, Any]) -> None:
    """Equal alone and in company, for equal seeds."""
    engine = shared_vlm()
    alone = play(engine, ask("What is this?", "red", **options))[0]
    company = play(engine, ask("total"), ask("What is this?", "red", **options), ask("What is this?", "blue"))
    assert company[1] == alone


def test_cancelled_between_chunks() -> None:
    engine = shared_vlm()
    row = engine.prepare(b"z" * 16, ask("river " * 300, "red")).row
    engine.insert(row)
    engine.step()
    assert engine.remove(row.request_id)
    assert not engine.busy
    assert tuple(play(engine, ask("What is this?", "red"))[0]) == expected("qwen2_vl", "What is this?", "red")


def test_a_failing_tower_fails_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = shared_vlm()
    sight = engine._base._facts.sight
    good = type(sight)._look

    def look(self: Any, media: Any) -> Any:
        if media.keys == bad.media.keys:
            raise ValueError("no such patch")
        return good(self, media)

    rows = [engine.prepare(bytes([n]) * 16, ask("What is this?", name)).row for n, name in enumerate(("red", "blue"))]
    bad = rows[1]
    monkeypatch.setattr(type(sight), "_look", look)
    for row in rows:
        engine.insert(row)
    outs = _all(engine)
    assert [out.message for out in outs if isinstance(out, RowFailed)] == [
        "the model failed on the images: ValueError: no such patch"
    ]
    tokens = [out.token for out in outs if isinstance(out, TokenOut)]
    assert tuple(tokens) == expected("qwen2_vl", "What is this?", "red")


def _all(engine: Engine) -> Sequence[Any]:
    outs: list[Any] = []
    while engine.busy:
        outs += engine.step()
    return outs


def test_users_words_are_no_picture() -> None:
    """The mark of a picture in a text asks for a picture that is not there."""
    with pytest.raises(Refused) as caught:
        shared_vlm().prepare(b"a" * 16, ask("what is <|image_pad|> ?", "red"))
    assert caught.value.code is ErrorCode.BAD_REQUEST


def test_one_picture_in_two_sizes_and_then_both() -> None:
    """Their features differ in number: that is a miss, never a join that fails."""
    engine = open_vlm(cache_entries=16)
    small, large = picture("red").resize((40, 30)), picture("red")

    def both(*pictures: Image.Image) -> Generate:
        images = [Part("image", data=png(one)) for one in pictures]
        return Generate("tiny", messages=[ChatMessage("user", "Same?")], images=images, max_tokens=TOKENS)

    try:
        for shown in ((small,), (large,), (small, large), (large, small)):
            assert play(engine, both(*shown)) == play(shared_vlm(), both(*shown))
    finally:
        engine.close()


def test_a_batch_that_fails_looks_at_the_pictures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows start over, one by one; their pixels were given back when they were prefilled."""
    engine: Any = open_vlm()
    try:
        monkeypatch.setattr(type(engine._base._batch), "step", lambda self, beside: [][1])
        cases = (("What is this?", "red"), ("What is this?", "blue"))
        found = play(engine, *(ask(*case) for case in cases))
        assert engine.served(bytes(16)).engine == "vision"
        assert [tuple(tokens[-TOKENS:]) for tokens in found] == [expected("qwen2_vl", *case) for case in cases]
    finally:
        engine.close()


def test_pictures_that_must_go_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where tokens of a picture see each other both ways; what the cache has of half a picture is no use then."""
    engine: Any = open_vlm(cache_entries=16)
    sight = engine._base._facts.sight
    chunks: list[tuple[int, int]] = []
    advance = type(sight).advance

    def note(self: Any, live: Any, end: int) -> int:
        start, reached = live.cached, advance(self, live, min(end, live.cached + 3))
        chunks.append((start, reached))
        return reached

    monkeypatch.setattr(type(sight), "advance", note)
    monkeypatch.setattr(type(sight), "_in_parts", lambda self, live, features, layers: False)
    try:
        end = engine.prepare(b"p" * 16, ask("What is this?", "red")).row.media.end
        assert tuple(play(engine, ask("What is this?", "red"))[0]) == expected("qwen2_vl", "What is this?", "red")
        assert chunks[0] == (0, end)
        assert chunks[1][1] == end + 3
        keys = engine.prepare(b"p" * 16, ask("What is this?", "red")).row.media.keys
        half = [*keys[: end - 1], 7]
        monkeypatch.setattr("mlx_bulkhead.worker.engines.live.Live.keys", lambda self: half + self.ids[len(half) :])
        assert tuple(play(engine, ask("What is this?", "red"))[0]) == expected("qwen2_vl", "What is this?", "red")
    finally:
        engine.close()


def test_pixels_of_those_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is over the bound is decoded again when its turn comes."""
    from mlx_bulkhead.worker.vision import prepare

    engine = open_vlm()
    try:
        one = engine.prepare(b"h" * 16, ask("What is this?", "red")).row.media
        assert one.pixel_bytes > 0
        monkeypatch.setattr(prepare, "HELD_BYTES", one.pixel_bytes)
        other = engine.prepare(b"i" * 16, ask("What is this?", "blue")).row.media
        assert other.pixel_bytes == 0
        del one
        cases = (("What is this?", "red"), ("What is this?", "blue"), ("What is this?", "dot"))
        found = play(engine, *(ask(*case) for case in cases))
        assert [tuple(tokens) for tokens in found] == [expected("qwen2_vl", *case) for case in cases]
    finally:
        engine.close()
