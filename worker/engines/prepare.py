"""Turns a `Generate` into a checked row and its text side: everything that needs the tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ...protocol import limits
from ...protocol.commands import Generate
from ...protocol.errors import ErrorCode
from ..text.constraints import Constraints
from ..text.detokenize import Detokenizers
from ..text.output import TextStream
from ..text.sampling import check_sampling
from ..text.templates import encode_messages, encode_prompt
from .base import Prepared, Refused, Row, Sampling


class Preparer:
    """Holds the tokenizer of a loaded model and the bounds of its requests."""

    def __init__(self, tokenizer: Any, vocabulary: int, context_limit: int, eos: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._context_limit = context_limit
        self._eos = eos
        self._detokenizers = Detokenizers(tokenizer)
        self._constraints = Constraints(tokenizer, vocabulary, eos)

    def prepare(self, request_id: bytes, request: Generate) -> Prepared:
        """Render, tokenise, check. Raises `Refused`."""
        sampling = _sampling(request)
        check_sampling(sampling, self._vocabulary)
        prompt = self._prompt(request)
        max_tokens = self._fit(len(prompt), request.max_tokens or limits.DEFAULT_MAX_TOKENS)
        emitted = self._emitted(request.resume_tokens, max_tokens)
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        text = TextStream(self._detokenizers.make(), stops, self._eos)
        if request.resume_tokens:
            text.replay(emitted, request.resume_chars)
        row = Row(
            request_id,
            prompt,
            max_tokens,
            sampling,
            emitted,
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            constrain=self._constrain(request, prompt),
        )
        return Prepared(row, text)

    def _constrain(self, request: Generate, prompt: list[int]) -> Callable[[Sequence[int]], Any] | None:
        """What keeps the answer in its form, if it must have one."""
        if request.response_format is None:
            return None
        arguments = request.template_args or {}
        wanted = all(arguments.get(name) is not False for name in ("enable_thinking", "thinking"))
        return self._constraints.make(
            request.response_format, prompt, may_think=request.messages is not None and wanted
        )

    def _prompt(self, request: Generate) -> list[int]:
        if request.messages is not None:
            prompt = encode_messages(self._tokenizer, request.messages, request.tools, request.template_args)
        elif request.tokens is not None:
            prompt = list(request.tokens)
        else:
            prompt = encode_prompt(self._tokenizer, request.prompt or "")
        if not prompt:
            raise Refused(ErrorCode.BAD_REQUEST, "the prompt encodes to no tokens")
        largest, smallest = max(prompt), min(prompt)
        if largest >= self._vocabulary or smallest < 0:
            bad = largest if largest >= self._vocabulary else smallest
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"the prompt has token id {bad}; this vocabulary has ids 0 to {self._vocabulary - 1}",
            )
        return prompt

    def _fit(self, prompt: int, max_tokens: int) -> int:
        """`max_tokens`, cut to what the context leaves."""
        limit = self._context_limit
        if not limit:
            return max_tokens
        if prompt + 1 > limit:
            raise Refused(
                ErrorCode.CONTEXT_OVERFLOW,
                f"the prompt has {prompt} tokens and the context limit is {limit}, which leaves no room for "
                "an answer; shorten the prompt, or load the model with a larger context_limit if it has one",
            )
        return min(max_tokens, limit - prompt)

    def _emitted(self, resumed: list[int], max_tokens: int) -> list[int]:
        """Tokens of an earlier incarnation, without those that end the row.

        The last token of a row carries its finish. If only that was lost, it is generated once more.
        """
        for index, token in enumerate(resumed[: max_tokens - 1]):
            if token in self._eos or not 0 <= token < self._vocabulary:
                return resumed[:index]
        return resumed[: max_tokens - 1]


def _sampling(request: Generate) -> Sampling:
    temperature = request.temperature
    seed = request.seed
    return Sampling(
        temperature=limits.DEFAULT_TEMPERATURE if temperature is None else temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=int.from_bytes(os.urandom(8), "little") & limits.MAX_SEED if seed is None else seed,
        logit_bias=dict(request.logit_bias or {}),
        repetition_penalty=request.repetition_penalty,
        repetition_window=request.repetition_window,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        xtc_probability=request.xtc_probability,
        xtc_threshold=request.xtc_threshold,
    )
