"""Hypothesis strategies for every message, derived from the field types."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from mlx_bulkhead.protocol.codec import KINDS, Message
from msgspec import inspect

texts = st.text(max_size=20)
ints = st.integers(min_value=-(2**63), max_value=2**64 - 1)
floats = st.floats(allow_nan=False)
plain = st.recursive(
    st.none() | st.booleans() | ints | floats | texts | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
"""What JSON can say, and bytes."""


def _of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.UnionType(types=types):
            return st.one_of([_of(one) for one in types])
        case inspect.ListType(item_type=item):
            return st.lists(_of(item), max_size=3)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_of(key), _of(value), max_size=3)
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.StructType(cls=cls):
            return struct(cls)
        case inspect.BytesType():
            return st.binary(max_size=20)
        case inspect.StrType():
            return texts
        case inspect.IntType():
            return ints
        case inspect.FloatType():
            return floats
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.AnyType():
            return plain
        case _:
            raise TypeError(f"no strategy for {kind}")


def struct(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Instances of a Struct; fields with a default are left out at times."""
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    required = {field.name: _of(field.type) for field in info.fields if field.required}
    optional = {field.name: _of(field.type) for field in info.fields if not field.required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda fields: cls(**fields))


BY_KIND: dict[int, st.SearchStrategy[Message]] = {kind: struct(cls) for kind, cls in KINDS.items()}
messages: st.SearchStrategy[Message] = st.one_of(list(BY_KIND.values()))
