"""Turns a request with pictures into a row: files, pixels, prompt, token ids. Text requests go the usual way."""

from __future__ import annotations

import hashlib
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

from ...protocol.commands import Generate
from ...protocol.errors import ErrorCode
from ...protocol.values import Part
from ..engines.base import Prepared, Refused
from ..engines.prepare import Preparer
from ..engines.reasons import short
from ..engines.sight import Inputs, Media, Sight
from .pictures import decode_all
from .places import has_images, place
from .prompts import Turns, render_chat
from .sources import ImageLimits, check_count, read_all

HELD_BYTES: Final = 2**30
"""Pixels of requests that wait or are prefilled. What is over it is decoded again later."""
_MEDIA_KEY: Final = 0x8000_0000
"""Set in the keys of picture tokens: no vocabulary has such ids."""


class VisionPreparer(Preparer):
    """Holds the processor too."""

    def __init__(
        self,
        tokenizer: Any,
        vocabulary: int,
        context_limit: int,
        eos: frozenset[int],
        sight: Sight,
        limits: ImageLimits,
    ) -> None:
        super().__init__(tokenizer, vocabulary, context_limit, eos)
        self._sight = sight
        self._limits = limits
        self._turns = self._tokenizer = Turns(tokenizer)
        self._media: Media | None = None
        self._prepared: weakref.WeakSet[Media] = weakref.WeakSet()

    def prepare(self, request_id: bytes, request: Generate) -> Prepared:
        """Render, tokenise, check. Raises `Refused`."""
        self._media = None
        prepared = super().prepare(request_id, request)
        media, self._media = self._media, None
        return prepared if media is None else Prepared(replace(prepared.row, media=media), prepared.text)

    def _prompt(self, request: Generate) -> list[int]:
        if request.messages is None or not has_images(request):
            return super()._prompt(request)
        messages, parts = place(request.messages, request.images)
        check_count(len(parts), self._limits)
        _check_resumed(request, parts)
        self._bound.check_messages(messages, request.tools, request.template_args)
        sight = self._sight
        text = render_chat(self._turns, sight.processor, sight.config, request, messages, len(parts))
        self._bound.check(text)
        files = read_all(parts, self._limits)
        pictures = decode_all(files, self._limits)
        try:
            inputs = sight.process(text, pictures)
        except Exception as error:
            raise Refused(
                ErrorCode.BAD_REQUEST, f"the model's processor refuses the {len(pictures)} images: {short(error)}"
            ) from error

        def again() -> Inputs:
            return sight.process(text, decode_all(files, self._limits))

        ids = inputs.ids
        keys = media_keys(ids, sight.image_tokens, [hashlib.sha256(file).digest() for file in files])
        media = self._media = sight.media(inputs, keys, again)
        self._prepared.add(media)
        if sum(other.pixel_bytes for other in self._prepared) > HELD_BYTES:
            media.inputs = None  # made anew when its turn comes
        return self._checked(ids)


def media_keys(ids: Sequence[int], image_tokens: frozenset[int], digests: Sequence[bytes]) -> list[int]:
    """The ids under which a prompt is cached: tokens of a picture are told apart by its content.

    Where each run of picture tokens is one picture, it has that picture's content alone, so that a longer chat finds
    what a shorter one left. Where pictures are cut into tiles, all runs have the content of all pictures.
    """
    runs = [(seen, len(list(group))) for seen, group in groupby(ids, key=image_tokens.__contains__)]
    count = sum(seen for seen, _ in runs)
    if not count:
        raise Refused(ErrorCode.BAD_REQUEST, "the prompt has no place for the images: the template drops them")
    if runs[-1][0]:
        raise Refused(ErrorCode.BAD_REQUEST, "the prompt ends with an image; let some text follow")
    apart = count == len(digests)
    whole = hashlib.sha256(b"".join(digests)).digest()
    keys: list[int] = []
    number = 0
    for seen, length in runs:
        if not seen:
            keys += ids[len(keys) : len(keys) + length]
            continue
        digest = digests[number] if apart else whole + number.to_bytes(4, "little")
        words = array("I", hashlib.shake_256(digest).digest(4 * length))
        keys += [_MEDIA_KEY | word for word in words]
        number += 1
    return keys


def _check_resumed(request: Generate, parts: Sequence[Part]) -> None:
    """A picture that lies elsewhere may have changed since the first worker saw it."""
    if request.resume_tokens and any(part.path is not None or part.url is not None for part in parts):
        raise Refused(
            ErrorCode.WORKER_CRASHED,
            f"the worker died after {len(request.resume_tokens)} tokens of an answer about images given by path or "
            "URL; these may have changed, so the answer is not continued; ask again, or send the images' bytes",
        )
