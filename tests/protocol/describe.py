"""The tables of docs/protocol.md as the code has them: names, types and defaults in the document's words."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from mlx_bulkhead.protocol import codec, values
from msgspec import inspect

_ORDER = ("text", "int", "float", "bool", "bytes", "list", "map", "one of", "any", "null")


def described() -> dict[str, type[msgspec.Struct]]:
    """Every message and nested value, by name."""
    nested = [cls for cls in vars(values).values() if isinstance(cls, type) and issubclass(cls, values.Value)]
    return {cls.__name__: cls for cls in (*codec.KINDS.values(), *nested) if cls is not values.Value}


def rows(cls: type[msgspec.Struct]) -> list[tuple[str, str, str]]:
    """Name, type and default of each field."""
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return [(f"`{field.name}`", type_words(field.type), default_words(field)) for field in info.fields]


def type_words(kind: inspect.Type) -> str:
    """`list of int`, `text or null`: a type as a person would say it in any language."""
    match kind:
        case inspect.UnionType(types=types):
            return " or ".join(sorted(map(type_words, types), key=_rank))
        case inspect.ListType(item_type=item):
            return f"list of {type_words(item)}"
        case inspect.DictType(key_type=key, value_type=value):
            return f"map of {type_words(key)} to {type_words(value)}"
        case inspect.LiteralType(values=choices):
            return "one of " + ", ".join(f"`{choice}`" for choice in choices)
        case inspect.StructType(cls=cls):
            return cls.__name__
        case inspect.StrType():
            return "text"
        case inspect.NoneType():
            return "null"
        case _:
            return type(kind).__name__.removesuffix("Type").lower()


def _rank(words: str) -> int:
    return next((index for index, start in enumerate(_ORDER) if words.startswith(start)), len(_ORDER) - 2)


def default_words(field: inspect.Field) -> str:
    """What a reader takes when the field is absent."""
    if field.required:
        return "required"
    value: Any = field.default
    if value is inspect.NODEFAULT:
        value = field.default_factory() if callable(field.default_factory) else None
    if isinstance(value, msgspec.Struct):
        return "all defaults"
    return f"`{json.dumps(value)}`"
