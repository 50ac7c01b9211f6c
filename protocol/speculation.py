"""Values of speculative decoding. No behaviour beyond construction."""

from __future__ import annotations

from typing import Literal

from .value import Value

Speculative = Literal["auto", "on", "off"]
DraftDtype = Literal["auto", "own", "float32", "bfloat16", "float16"]
VerifyMode = Literal["adaptive", "dflash", "ddtree", "off"]


class Draft(Value, frozen=True):
    """A draft for speculative decoding, and how it is used."""

    model: str
    """A directory, a Hugging Face id, or `auto`: the one that dflash-mlx knows for the target."""
    quant: str = ""
    """Such as `w4a16:gs64`. `none`: as it is. Empty: as it is, or what dflash-mlx uses for a draft that it knows."""
    dtype: DraftDtype = "auto"
    """What it computes in. `auto`: float32 on a CPU, else its own."""
    required: bool = False
    """A load without it fails, instead of serving plainly."""
    max_ctx: int | None = None
    """Prompts of so many tokens and more are decoded plainly. None: no prompt is too long."""
    verify_mode: VerifyMode = "adaptive"
    """How dflash-mlx checks a block. `off`: without its kernels for quantised targets."""
    window: int = 1024
    """Newest tokens that the draft looks at."""
    sink: int = 64
    """First tokens that it looks at, too."""
    copy_drafting: bool | None = None
    """Draft by copying repeated text where there is some. None: yes."""
    cache_entries: int = 4
    """Prefixes kept in memory for it. 0: none."""
    cache_bytes: int = 8 * 1024**3
    disk_bytes: int = 0
    """Bytes that they may take on disk. 0: none."""


class SpeculationInfo(Value, frozen=True):
    """What became of the draft of a load."""

    active: bool = False
    reason: str = ""
    """Why it is not in use."""
    draft: str = ""
    family: str = ""
    block_tokens: int = 0
    layers: int = 0
    dtype: str = ""
    quant: str = ""
    verify_mode: str = ""
    bytes: int = 0
    cycle_cost: float = 0.0
    """Time of a cycle in plain tokens, measured at load. 0: not measured."""


class Speculation(Value, frozen=True):
    """What speculation did for one request."""

    cycles: int = 0
    tokens: int = 0
    """Generated in these cycles."""
    accepted: int = 0
    """Of these, proposed by the draft."""
