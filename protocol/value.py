"""The base of every nested value."""

from __future__ import annotations

import msgspec


class Value(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of every nested value: frozen, encoded as a map, fields at their default left out."""
