"""Pictures: a stream beside mlx-vlm's own, the cache, company, and what large ones cost the daemon."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from PIL import Image

from .. import streams, tiny
from ..bench import Bench
from ..library import Batched, Streamed
from ..measure import Figure, Pairs, at_least, at_most, spread
from ..vlm_library import VlmLibrary

MODEL = "eye"
TOKENS = 128
SIDE = 640
LARGE = 1300
"""Noise of that side is a PNG of 5 MB."""


def vision(bench: Bench) -> list[Figure]:
    model = tiny.make(bench.folder / "eye", "vision")
    bench.client.load(MODEL, model)
    library = VlmLibrary(model)
    try:
        return [_single(bench, library), _again(bench), *_company(bench, library), _memory(bench)]
    finally:
        library.close()
        bench.client.unload(MODEL)


def _single(bench: Bench, library: VlmLibrary) -> Figure:
    pairs, firsts = Pairs(), Pairs()
    for number in range(bench.rounds + 1):
        file = bench.folder / f"{number}.png"
        file.write_bytes(_noise(SIDE))
        text = f"What is this, {number}?"
        theirs = library.stream(text, [file], TOKENS)
        ours = _stream(bench, text, [file.read_bytes()])
        if ours.tokens != theirs.tokens:
            raise RuntimeError(f"the tokens differ: {ours.tokens} and {theirs.tokens}")
        if number:  # the first is a rehearsal
            pairs.ours.append(ours.rate)
            pairs.theirs.append(theirs.rate)
            firsts.ours.append(ours.first * 1e3)
            firsts.theirs.append(theirs.first * 1e3)
    beside = f"tok/s: {spread(pairs.ours)}; mlx-vlm {spread(pairs.theirs)}. First token, ms: "
    beside += f"{spread(firsts.ours, 1)}; mlx-vlm {spread(firsts.theirs, 1)}"
    return at_least("1 stream with an image, over `mlx_vlm.stream_generate`", pairs.ratios, 0.97, beside)


def _again(bench: Bench) -> Figure:
    pairs = Pairs()
    for number in range(bench.rounds):
        picture = _noise(SIDE)
        _stream(bench, f"What is this, {number}?", [picture])
        pairs.theirs.append(_stream(bench, f"Which colour, {number}?", [picture], cache=False).first * 1e3)
        pairs.ours.append(_stream(bench, f"Which colour, {number}?", [picture]).first * 1e3)
    beside = f"ms: {spread(pairs.ours, 1)}; without {spread(pairs.theirs, 1)}"
    what = "second question about the same image: first token with cache over without"
    return at_most(what, pairs.ratios, 0.3, "", digits=3, beside=beside)


def _company(bench: Bench, library: VlmLibrary) -> list[Figure]:
    """Four with an image and four without, at once: the text of each as alone, the rate as in the library's batch."""
    pairs, steady = Pairs(), Pairs()
    same = 0
    for number in range(bench.rounds + 1):
        asked: list[tuple[str, list[Path]]] = []
        for n in range(8):
            file = bench.folder / f"of {number}, {n}.png"
            file.write_bytes(_noise(224))
            asked.append((f"What is this, {number}, {n}?", [file] if n % 2 else []))
        if number % 2:
            ours, theirs = _batch(bench, asked), library.batch(asked, TOKENS)
        else:
            theirs, ours = library.batch(asked, TOKENS), _batch(bench, asked)
        if number:  # the first is a rehearsal
            for side, batch in ((pairs.ours, ours), (pairs.theirs, theirs)):
                side.append(sum(map(len, batch.tokens)) / batch.seconds)
            steady.ours.append(ours.steady)
            steady.theirs.append(theirs.steady)
            continue
        alone = [library.stream(text, files, TOKENS).tokens for text, files in asked]
        same = sum(a == b for a, b in zip(alone, ours.tokens, strict=True))
    beside = f"tok/s: {spread(pairs.ours)}; mlx-vlm {spread(pairs.theirs)}. "
    beside += f"From where each has a token the ratio is {spread(steady.ratios, 2)}"
    return [
        Figure("4 image and 4 text requests at once: answers as mlx-vlm's alone", [same], "all 8", same == 8, "", 0),
        at_least("the same, all tokens a second, over mlx-vlm's `BatchGenerator`", pairs.ratios, 0.95, beside),
    ]


def _memory(bench: Bench) -> Figure:
    daemon = psutil.Process(bench.daemon.pid)
    picture = _noise(LARGE)
    before = daemon.memory_info().rss
    stream = bench.client.generate(MODEL, images=[picture] * 8, max_tokens=8, messages=_chat("What are these?"))
    next(snap for snap in stream if snap.tokens)
    during = daemon.memory_info().rss - before
    stream.result()
    streams.stream(bench.client, "after it", 8)
    beside = f"after its end {(daemon.memory_info().rss - before) / 1e6:.1f} MB; {len(picture) / 1e6:.1f} MB each"
    what = "8 images of 5 MB: resident memory of the daemon while they are answered"
    return at_most(what, [during / 1e6], 50.0, "MB", digits=1, beside=beside)


def _chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _stream(bench: Bench, text: str, images: list[bytes], *, cache: bool = True) -> Streamed:
    return streams.read(_ask(bench, text, images, cache=cache))


def _batch(bench: Bench, asked: Sequence[tuple[str, Sequence[Path]]]) -> Batched:
    return streams.together([_ask(bench, text, [file.read_bytes() for file in files]) for text, files in asked])


def _ask(bench: Bench, text: str, images: list[bytes], *, cache: bool = True) -> streams.Ask:
    chat = _chat(text)
    return partial(
        bench.client.generate, MODEL, messages=chat, images=images, max_tokens=TOKENS, temperature=0.0, cache=cache
    )


def _noise(side: int) -> bytes:
    """A picture like no other: no cache can help."""
    stream = io.BytesIO()
    bands = [Image.effect_noise((side, side), 80) for _ in range(3)]
    Image.merge("RGB", bands).save(stream, "PNG", compress_level=1)
    return stream.getvalue()
