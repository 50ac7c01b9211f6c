"""What is asked of the model: prompts that differ from each other but not from run to run. Pure."""

from __future__ import annotations

import random

from tests.support.tiny_models import CORPUS

_WORDS = [word for word in CORPUS.split() if word.isascii() and word.isalpha()]


def text_prompt(seed: int, words: int = 8) -> str:
    """A short prompt of words."""
    choose = random.Random(seed)
    return f"{seed}: " + " ".join(choose.choice(_WORDS) for _ in range(words)) + "?"


def token_prompt(seed: int, count: int) -> list[int]:
    """A prompt of exactly so many token ids, none of them special."""
    choose = random.Random(seed)
    return [choose.randrange(300, 900) for _ in range(count)]
