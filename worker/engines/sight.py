"""The model of mlx-vlm as the text engine uses it: pictures become embeddings of the prompt, the rest is text.

Tokens up to a prompt's last picture are fed as embeddings; all others, and all of a text prompt, as ids. So a prompt
whose pictures are in the prompt cache never runs the vision tower. Where positions depend on the pictures
(Qwen's mRoPE), a row's shift goes with its cache, as one more layer: it is merged, split and moved like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models import cache as lm_cache
from mlx_vlm.generate.common import _chunked_prefill_enabled
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.utils import prepare_inputs, should_add_special_tokens

from .live import Live

_TOKEN_NAMES: Final = ("image_token_id", "image_token_index")


@dataclass(slots=True)
class Inputs:
    """What a processor makes of a text and its pictures."""

    ids: list[int]
    pixels: Any
    mask: Any
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True, eq=False, weakref_slot=True)
class Media:
    """The pictures of a row."""

    inputs: Inputs | None
    """None once it is prefilled, or while too much waits: pixels are large."""
    again: Callable[[], Inputs]
    """Makes them anew, for a row that starts over."""
    keys: list[int]
    """The prompt's ids, with tokens of pictures told apart by content."""
    end: int
    """Tokens up to the last one of a picture."""
    positions: Any = None
    """[3, 1, tokens] of the prompt, where they depend on pictures."""
    delta: Any = None
    """[1, 1]: what is added to the place of a token after the pictures."""

    @property
    def pixel_bytes(self) -> int:
        """What its pixels take now."""
        return getattr(self.inputs.pixels, "nbytes", 0) if self.inputs is not None else 0


@dataclass(slots=True)
class Features:
    """The embeddings of a row's prompt, while it is prefilled."""

    embeds: Any
    extra: dict[str, Any]


class Sight:
    """The language side of a vision model, callable as mlx-lm's models are, and its eyes."""

    def __init__(self, model: Any, processor: Any) -> None:
        self._model = model
        self._language = model.language_model
        self.processor = processor
        self.config = model.config
        self._turns = callable(getattr(self._language, "get_rope_index", None)) and hasattr(
            self._language, "_rope_deltas"
        )
        own = [getattr(model.config, name, None) for name in _TOKEN_NAMES]
        own.append(getattr(processor, "image_token_id", None))
        self.image_tokens = frozenset(token for token in own if isinstance(token, int))

    @property
    def language(self) -> Any:
        """mlx-vlm's language model."""
        return self._language

    # What mlx-lm asks of a model.

    @property
    def layers(self) -> Any:
        return self._language.layers

    def make_cache(self) -> list[Any]:
        """Empty caches, of mlx-lm's kinds where it has them: those are what batches and the prompt cache know."""
        own = make_prompt_cache(self._language)
        made = own
        if self.batchable:
            made = [_known(layer) for layer in own]
        return [*made, _shift(mx.zeros((1, 1), mx.int32))] if self._turns else made

    @property
    def batchable(self) -> bool:
        """Whether its rows may share a batch of mlx-lm: all its caches are of kinds that this knows."""
        return all(_known(layer) is not None for layer in make_prompt_cache(self._language))

    def __call__(self, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Logits of tokens that are text."""
        if cache is None or not self._turns:
            return self._language(inputs, cache=cache).logits
        layers, delta = list(cache[:-1]), cache[-1][0]
        offset = next((layer.offset for layer in layers if hasattr(layer, "offset")), 0)
        if isinstance(offset, mx.array) and offset.ndim:
            offset = offset[:, None]
        places = mx.arange(inputs.shape[1])[None] + offset + delta
        places = mx.broadcast_to(places, inputs.shape)
        return self._language(inputs, cache=layers, position_ids=mx.broadcast_to(places, (3, *inputs.shape))).logits

    # Pictures.

    def process(self, text: str, pictures: list[Any]) -> Inputs:
        """Ids and pixels, as mlx-vlm's own `stream_generate` makes them. Raises what a processor raises."""
        made: Any = prepare_inputs(
            self.processor,
            images=pictures,
            prompts=text,
            image_token_index=getattr(self.config, "image_token_index", None),
            add_special_tokens=should_add_special_tokens(self.config.model_type, self.processor),
        )
        ids = made.pop("input_ids")
        pixels, mask = made.pop("pixel_values", None), made.pop("attention_mask", None)
        return Inputs(ids.flatten().tolist(), pixels, mask, {k: v for k, v in made.items() if v is not None})

    def media(self, inputs: Inputs, keys: list[int], again: Callable[[], Inputs]) -> Media:
        """The pictures of a row whose prompt is `inputs.ids`."""
        end = max(index for index, token in enumerate(inputs.ids) if token in self.image_tokens) + 1
        media = Media(inputs, again, keys, end)
        if self._turns:
            extra = inputs.extra
            positions, delta = self._language.get_rope_index(
                mx.array([inputs.ids]), extra.get("image_grid_thw"), extra.get("video_grid_thw"), inputs.mask
            )
            count = len(inputs.ids)
            media.positions = mx.broadcast_to(positions, (3, 1, count))
            media.delta = mx.array(delta).reshape(1, 1).astype(mx.int32)
            mx.eval(media.positions, media.delta)
        return media

    def bare(self, cache: Sequence[Any]) -> Sequence[Any]:
        """A row's caches as they are kept: without what depends on the row."""
        return cache[:-1] if self._turns else cache

    def dressed(self, cache: list[Any], media: Media | None) -> list[Any]:
        """Kept caches, for a row with these pictures."""
        if not self._turns:
            return cache
        return [*cache, _shift(mx.zeros((1, 1), mx.int32) if media is None else media.delta)]

    def advance(self, live: Live, end: int) -> int:
        """Prefill a row's tokens up to `end`, or less far; gives where. Raises what the model raises."""
        media, cache, start = live.row.media, live.cache or [], live.cached
        if self._turns:
            cache[-1][0] = mx.zeros((1, 1), mx.int32) if media is None else media.delta
        if media is None or start >= media.end:
            self(mx.array([live.ids[start:end]]), cache)
            return end
        if live.features is None:
            live.features = self._look(media)
        features: Features = live.features
        layers = self.bare(cache)
        end = min(end, media.end)
        extra = dict(features.extra)
        if not self._in_parts(live, features, layers):
            # Within a picture tokens see each other both ways: they go in one piece, from the beginning.
            if start:
                cache[: len(layers)] = self.bare(self.make_cache())
                layers, start, live.cached, live.hit = self.bare(cache), 0, 0, 0
            end, count = media.end, len(media.keys)
            extra = {k: v[:, :end] if _is_of_tokens(v, count) else v for k, v in extra.items()}
        if media.positions is not None:
            extra["position_ids"] = media.positions[..., start:end]
        out = self._language(
            inputs=mx.array([live.ids[start:end]]),
            inputs_embeds=features.embeds[:, start:end],
            cache=layers,
            n_to_process=end - start,
            logits_to_keep=1,
            **extra,
        )
        if out.cross_attention_states is not None or out.encoder_outputs is not None:
            raise NotImplementedError(f"models with an encoder ({self.config.model_type}) are not served")
        if end >= media.end:
            live.features = media.inputs = None
        return end

    def _look(self, media: Media) -> Features:
        inputs = media.inputs = media.inputs or media.again()
        ids = mx.array([inputs.ids])
        found: Any = self._model.get_input_embeddings(ids, inputs.pixels, mask=inputs.mask, **inputs.extra)
        embeds = found.inputs_embeds
        if embeds.shape[1] != len(inputs.ids):
            raise NotImplementedError(
                f"{self.config.model_type} makes {embeds.shape[1]} embeddings of {len(inputs.ids)} tokens"
            )
        mx.eval(embeds)
        extra = {**inputs.extra, **{k: v for k, v in found.to_dict().items() if k != "inputs_embeds"}}
        if self._turns:
            extra.pop("rope_deltas", None)
            extra.pop("position_ids", None)
        return Features(embeds, {k: v for k, v in extra.items() if v is not None})

    def in_parts(self) -> bool:
        """Whether text may be prefilled in chunks, and tokens after each other."""
        return _chunked_prefill_enabled(self._model, input_ids=mx.array([[0]]), prefill_kwargs={})

    def _in_parts(self, live: Live, features: Features, layers: Sequence[Any]) -> bool:
        """Whether a row's pictures may be prefilled in chunks."""
        return _chunked_prefill_enabled(
            self._model,
            input_ids=mx.array([live.ids[: len(live.row.prompt)]]),
            inputs_embeds=features.embeds,
            prompt_cache=layers,
            prefill_kwargs=features.extra,
        )


def _known(layer: Any) -> Any:
    kind = type(layer).__name__
    if kind == "KVCache":
        return lm_cache.KVCache()
    if kind == "RotatingKVCache":
        return lm_cache.RotatingKVCache(max_size=layer.max_size, keep=layer.keep)
    return None


def _is_of_tokens(value: Any, count: int) -> bool:
    return isinstance(value, mx.array) and value.ndim >= 2 and value.shape[:2] == (1, count)


def _shift(delta: mx.array) -> Any:
    made = lm_cache.ArraysCache(1)
    made[0] = delta
    return made
