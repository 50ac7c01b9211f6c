"""Decides, without MLX and without the network, whether a directory can be loaded.

It reads file names, `config.json`, the shard index and the headers of the safetensors files; never a weight.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .engines.base import LoadProblem

MAX_HEADER_BYTES = 100_000_000
"""Largest header that the safetensors format allows."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def resolve_model(model: str) -> Path | None:
    """The local path that `model` names, or None when it is a Hugging Face id.

    What exists, and what looks like a path, is local and never touches the network.
    """
    path = os.path.expanduser(model)  # which, unlike Path's, leaves an unknown user's home alone
    if model.startswith(("/", ".", "~")) or "\\" in model or model.count("/") > 1 or os.path.exists(path):
        return Path(path)
    return None


def check_model(path: Path) -> None:
    """Raise `LoadProblem`, naming the file and what was expected, unless `path` holds a complete model."""
    if not os.path.exists(path):
        raise LoadProblem(f"there is nothing at {path}")
    if not path.is_dir():
        if path.suffix == ".gguf":
            raise LoadProblem(_gguf(str(path)))
        raise LoadProblem(f"{path} is a file; a model is a directory with config.json and *.safetensors")
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise LoadProblem(f"cannot read {path}: {error.strerror or error}") from None
    weights = [name for name in names if name.startswith("model") and name.endswith(".safetensors")]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs and not weights:
        raise LoadProblem(_gguf(f"{path} (holding {ggufs[0]})"))
    config = read_config(path)
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise LoadProblem(f"{path / 'config.json'} has no model_type, which names the architecture")
    _check_shards(path)
    if not weights:
        raise LoadProblem(_no_weights(path, names))
    for name in weights:
        read_header(path / name)
    if not any(name in TOKENIZER_FILES or name.endswith(".tiktoken") for name in names):
        raise LoadProblem(f"{path} has no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}")


def read_config(path: Path) -> dict[str, Any]:
    """`config.json` of a model directory. Raises `LoadProblem`."""
    return read_object(path / "config.json")


def read_generation_config(path: Path) -> dict[str, Any]:
    """`generation_config.json`, or nothing: the file is optional and often hand-edited."""
    try:
        return read_object(path / "generation_config.json")
    except LoadProblem:
        return {}


def weight_bytes(path: Path) -> int:
    """Bytes of all tensors of a model directory, from the headers."""
    return sum(
        tensor["data_offsets"][1] - tensor["data_offsets"][0]
        for file in sorted(path.glob("model*.safetensors"))
        for tensor in _tensors(read_header(file))
    )


def read_header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file, after checking it against the file's size. Raises `LoadProblem`."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size == 0:
                raise LoadProblem(f"{file} is empty (0 bytes); download it again")
            if size < 8:
                raise LoadProblem(f"{file} is incomplete: expected at least 8 bytes, found {size}")
            if length > MAX_HEADER_BYTES or (size >= 10 and stream.peek(1)[:1] != b"{"):
                raise LoadProblem(f"{file} is not a safetensors file: its header is junk")
            if 8 + length > size:
                raise LoadProblem(f"{file} is incomplete: expected more than {8 + length} bytes, found {size}")
            raw = stream.read(length)
    except OSError as error:
        raise LoadProblem(f"cannot read {file}: {error.strerror or error}") from None
    header = _parse_header(file, raw)
    expected = 8 + length + max((tensor["data_offsets"][1] for tensor in _tensors(header)), default=0)
    if size < expected:
        raise LoadProblem(f"{file} is incomplete: expected {expected} bytes, found {size}; download it again")
    return header


def _parse_header(file: Path, raw: bytes) -> dict[str, Any]:
    junk = LoadProblem(f"{file} is not a safetensors file: its header is junk")
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise junk from None
    if not isinstance(header, dict):
        raise junk
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = tensor["data_offsets"]
            bits = _DTYPE_BITS.get(tensor["dtype"])
            elements = math.prod(tensor["shape"])
        except (TypeError, KeyError, ValueError):
            raise junk from None
        if not isinstance(begin, int) or not isinstance(end, int) or not 0 <= begin <= end:
            raise junk
        if bits is not None and elements * bits != (end - begin) * 8:
            raise LoadProblem(f"{file}: tensor {name} takes {end - begin} bytes, which does not fit its shape")
    return header


def _tensors(header: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (tensor for name, tensor in header.items() if name != "__metadata__")


def _check_shards(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise LoadProblem(f"{index} has no weight_map, which names the shards")
    shards = sorted({str(shard) for shard in weight_map.values()})
    missing = [shard for shard in shards if not (path / shard).exists()]
    # An index left over beside one whole model.safetensors is common and harmless.
    if missing and not (path / "model.safetensors").exists():
        raise LoadProblem(
            f"{path / missing[0]} is missing; {len(missing)} of {len(shards)} shards named by "
            f"{index.name} are not there; download the model again"
        )


def _no_weights(path: Path, names: list[str]) -> str:
    torch = next((name for name in names if name.endswith((".bin", ".pt", ".pth"))), None)
    if torch is not None:
        return f"{path} has PyTorch weights only ({torch}); MLX needs safetensors: convert with mlx_lm.convert"
    return f"{path} has no weights; expected model.safetensors or model-*-of-*.safetensors"


def _gguf(where: str) -> str:
    return (
        f"{where} is a GGUF model; MLX needs a converted directory with config.json, tokenizer.json and "
        "*.safetensors (look for an MLX conversion of the model, or use mlx_lm.convert on the original)"
    )


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `LoadProblem`."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadProblem(f"{file} is missing") from None
    except OSError as error:
        raise LoadProblem(f"cannot read {file}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise LoadProblem(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise LoadProblem(f"{file} must hold a JSON object, found {type(value).__name__}")
    return value
