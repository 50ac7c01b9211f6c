"""The file of a kept prefix: safetensors, with the tokens and a checksum among its metadata.

The bytes come from host memory and are written without MLX, so any thread may do it. Reading makes arrays and
is the executor's. A file gives states only; which kinds of caches they go into is the loaded model's say.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np

FORMAT: Final = "bulkhead-prefix-1"
MAX_HEADER: Final = 64 * 1024 * 1024

_TYPES: Final = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES: Final = {short: name for name, short in _TYPES.items()}


class BadFile(ValueError):
    """Not a file of ours, or damaged."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a file says of itself."""

    key: str
    salt: str
    tokens: bytes
    plain: bool
    digest: str
    plans: str
    arrays: list[tuple[str, list[int], int, int]]
    """Type, shape, and where the bytes begin and end after the header."""
    start: int
    size: int


@dataclass(slots=True)
class Draft:
    """A file in the making: the state of one layer after the other is copied into host memory."""

    key: str
    salt: str
    tokens: bytes
    plain: bool
    plans: list[Any] = field(default_factory=list[Any])
    arrays: list[tuple[str, list[int], bytes]] = field(default_factory=list[tuple[str, list[int], bytes]])

    @property
    def size(self) -> int:
        """Bytes of all arrays so far."""
        return sum(len(data) for _, _, data in self.arrays)

    def add(self, leaf: Any) -> None:
        """Copy one layer's state. On the executor."""
        state = leaf.state
        if self.plain:  # room for later tokens is not worth a write
            keys, values, offset = state
            state = (keys[..., :offset, :], values[..., :offset, :], offset)
        self.plans.append([type(leaf).__name__, self._plan(state)])

    def _plan(self, value: Any) -> Any:
        if isinstance(value, mx.array):
            flat = mx.contiguous(value).reshape(-1)
            data = bytes(memoryview(cast(Any, flat.view(mx.uint8)))) if value.size else b""
            self.arrays.append((_TYPES[str(value.dtype).rpartition(".")[2]], list(value.shape), data))
            return {"array": len(self.arrays) - 1}
        if isinstance(value, (list, tuple)):
            return [self._plan(item) for item in value]
        if value is None or isinstance(value, (bool, int, float)):
            return value
        raise TypeError(f"a cache's state holds a {type(value).__name__}")

    def header(self) -> bytes:
        """What comes before the arrays, checksum included."""
        plans = json.dumps(self.plans)
        digest = _digest(self.key, self.salt, self.tokens, plans)
        tensors: dict[str, Any] = {}
        position = 0
        for index, (kind, shape, data) in enumerate(self.arrays):
            digest.update(data)
            tensors[f"a{index}"] = {"dtype": kind, "shape": shape, "data_offsets": [position, position + len(data)]}
            position += len(data)
        about = {
            "format": FORMAT,
            "key": self.key,
            "salt": self.salt,
            "tokens": base64.b64encode(self.tokens).decode(),
            "plain": "yes" if self.plain else "no",
            "digest": digest.hexdigest(),
            "plans": plans,
        }
        header = json.dumps({"__metadata__": about, **tensors}).encode()
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header

    def write(self, path: Path, header: bytes) -> None:
        """Write and sync the file, without MLX. Raises `OSError`."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(header)
            for _, _, data in self.arrays:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())


def read_head(path: Path) -> Head:
    """What a file says of itself. Raises `BadFile` or `OSError`."""
    with open(path, "rb") as file:
        return _parse_head(file.read(8), file.read, os.fstat(file.fileno()).st_size)


def _parse_head(first: bytes, read: Any, size: int) -> Head:
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
        raise BadFile("no header")
    try:
        header = json.loads(read(length))
        about = header.pop("__metadata__")
        if about["format"] != FORMAT:
            raise BadFile(f"format {about['format']!r}")
        arrays: list[tuple[str, list[int], int, int]] = []
        position = 0
        for index in range(len(header)):
            tensor = header[f"a{index}"]
            begin, end = tensor["data_offsets"]
            if begin != position or end < begin:
                raise BadFile("arrays do not follow each other")
            position = end
            arrays.append((_NAMES[tensor["dtype"]], [int(n) for n in tensor["shape"]], begin, end))
        head = Head(
            key=str(about["key"]),
            salt=str(about["salt"]),
            tokens=base64.b64decode(about["tokens"], validate=True),
            plain=about["plain"] == "yes",
            digest=str(about["digest"]),
            plans=str(about["plans"]),
            arrays=arrays,
            start=8 + length,
            size=size,
        )
    except BadFile:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadFile(f"no header of ours: {type(error).__name__}") from None
    if size != head.start + position:
        raise BadFile(f"{size} bytes where the header wants {head.start + position}")
    return head


def read_into(path: Path, leaves: Sequence[Any]) -> Head:
    """Fill the fresh caches of a model's layers from a file. On the executor. Raises `BadFile` or `OSError`."""
    with open(path, "rb") as file:
        head = _parse_head(file.read(8), file.read, os.fstat(file.fileno()).st_size)
        data = memoryview(file.read())
    if len(data) != head.size - head.start:
        raise BadFile("shorter than it was a moment ago")
    digest = _digest(head.key, head.salt, head.tokens, head.plans)
    digest.update(data)
    if digest.hexdigest() != head.digest:
        raise BadFile("its bytes are not those that were written")
    try:
        plans = json.loads(head.plans)
        if [plan[0] for plan in plans] != [type(leaf).__name__ for leaf in leaves]:
            raise BadFile("other kinds of caches")
        arrays = [_array(data[begin:end], name, shape) for name, shape, begin, end in head.arrays]
        for leaf, plan in zip(leaves, plans, strict=True):
            leaf.state = _value(plan[1], arrays)
    except BadFile:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise BadFile(f"its states do not fit: {error}") from None
    return head


def _digest(key: str, salt: str, tokens: bytes, plans: str) -> Any:
    """The checksum of all but the arrays, which are still to be added."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (key.encode(), salt.encode(), tokens, plans.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest


def _array(data: memoryview, name: str, shape: list[int]) -> mx.array:
    kind = getattr(mx, name)
    if not len(data):
        return mx.zeros(shape, kind)
    return mx.array(np.frombuffer(data, dtype=np.uint8)).view(kind).reshape(shape)


def _value(plan: Any, arrays: Sequence[mx.array]) -> Any:
    if isinstance(plan, dict):
        return arrays[plan["array"]]
    if isinstance(plan, list):
        return [_value(item, arrays) for item in plan]
    return plan
