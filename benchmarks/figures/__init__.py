"""The figures, a file each: a function that measures and gives the lines of the table."""

from __future__ import annotations

from collections.abc import Callable

from ..bench import Bench
from ..measure import Figure
from .balloon import balloon
from .cache import cache, cache_after_crash
from .cancel import in_decode, in_prefill
from .caps import caps
from .choice import extras, structured
from .equal import equal
from .first_token import first_token
from .footprint import footprint
from .newcomer import newcomer
from .placement import placement
from .prediction import prediction
from .probe import probe
from .recovery import recovery
from .reload import reload
from .single import single
from .speculation import real_pair, speculation, speculation_equal
from .together import eight, sixteen
from .vision import vision
from .wire import wire

NEEDS_DRAFT = "real-pair"


def default_figures(draft: object) -> list[str]:
    """Those that are measured when none is named."""
    return [name for name in FIGURES if draft is not None or name != NEEDS_DRAFT]


FIGURES: dict[str, Callable[[Bench], list[Figure]]] = {
    "single": single,
    "eight": eight,
    "sixteen": sixteen,
    "first-token": first_token,
    "probe": probe,
    "cancel-decode": in_decode,
    "cancel-prefill": in_prefill,
    "newcomer": newcomer,
    "recovery": recovery,
    "cache": cache,
    "cache-crash": cache_after_crash,
    "structured": structured,
    "extras": extras,
    "placement": placement,
    "balloon": balloon,
    "prediction": prediction,
    "reload": reload,
    "caps": caps,
    "equal": equal,
    "speculation": speculation,
    "speculation-equal": speculation_equal,
    "real-pair": real_pair,
    "footprint": footprint,
    "vision": vision,
    "wire": wire,
}
