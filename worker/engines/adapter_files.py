"""Decides from its files, without MLX, whether an adapter's directory can be used, and which adapter a request gets.

It reads the configuration and the header of the weights; of the weights themselves only their hash.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...protocol.checks_names import BASE, known
from ...protocol.errors import ErrorCode
from ..model_check import read_header, read_object
from .base import LoadProblem, Refused

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapters.safetensors"
MAX_RANK: Final = 65_536
KINDS: Final = ("lora", "dora")
_PARAMETERS: Final = ("rank", "scale", "dropout", "keys")
_DTYPES: Final = ("F16", "BF16", "F32")
_FOREIGN: Final = (".npz", ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_LEGACY: Final = ("A", "B")
_CHUNK: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """What the files of an adapter say, checked as far as that goes without the model."""

    name: str
    folder: Path
    kind: str
    """`lora` or `dora`."""
    rank: int
    scale: float
    num_layers: int
    """The last so many layers of the model are changed; 0 or less: all."""
    keys: list[str] | None
    """Modules within a layer, or paths in the model. None: all that can be."""
    shapes: dict[str, tuple[int, ...]]
    """Of the tensors in its weights."""
    identity: str
    """A hash over both files."""

    def problem(self, what: str, code: ErrorCode = ErrorCode.LOAD_FAILED) -> LoadProblem:
        """An error that says which adapter it is about."""
        return LoadProblem(f"adapter {self.name!r}: {what}", code)


def pick_adapter(asked: str | None, names: Collection[str], default: str) -> str:
    """The adapter of a request, empty for the base model. Raises `Refused` for an unknown name."""
    name = default if asked is None else asked
    if name in ("", BASE):
        return ""
    if name not in names:
        listed = known(dict.fromkeys(names, ""))
        raise Refused(ErrorCode.BAD_REQUEST, f"adapter is {name[:60]!r}, {listed}; add_adapter adds one")
    return name


def read_adapter(name: str, folder: Path) -> AdapterFiles:
    """Check a directory. Raises `LoadProblem`, with the adapter's name, the file and what was expected."""
    try:
        return _read(name, folder)
    except LoadProblem as problem:
        raise LoadProblem(f"adapter {name!r}: {problem.message}", problem.code) from None


def _read(name: str, folder: Path) -> AdapterFiles:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise LoadProblem(
            f"cannot read {folder}, a directory with {CONFIG} and {WEIGHTS}: {error.strerror or error}"
        ) from None
    _refuse_foreign(folder, names)
    config = read_object(folder / CONFIG)
    if "peft_type" in config:
        raise _unsupported(f"{folder / CONFIG} is PEFT's")
    if "lora_parameters" not in config and {"rank", "alpha"} <= config.keys():
        raise _legacy(folder / CONFIG, "rank and alpha without lora_parameters")
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise _unsupported(f"{folder / CONFIG} has fine_tune_type full: it replaces weights of the model")
    if kind not in KINDS:
        raise LoadProblem(f"{folder / CONFIG} has fine_tune_type {kind!r}; expected {' or '.join(KINDS)}")
    shapes = _shapes(folder / WEIGHTS)
    layers = config.get("num_layers")
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise LoadProblem(f"{folder / CONFIG} has num_layers {layers!r}; expected a number of layers")
    rank, scale, keys = _parameters(folder / CONFIG, config.get("lora_parameters"))
    return AdapterFiles(name, folder, str(kind), rank, scale, layers, keys, shapes, _identity(folder))


def _refuse_foreign(folder: Path, names: list[str]) -> None:
    """Formats that are not read, by what is there instead of the two files."""
    if CONFIG in names and WEIGHTS in names:
        return
    if "adapter_model.safetensors" in names or "adapter_model.bin" in names:
        raise _unsupported(f"{folder} holds an adapter of PEFT")
    if WEIGHTS not in names:
        foreign = next((name for name in names if name.endswith(_FOREIGN)), None)
        if foreign is not None:
            raise _unsupported(f"{folder / foreign} is a pickle or an archive, which is never opened")
        raise LoadProblem(f"{folder / WEIGHTS} is missing")


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    header = {name: tensor for name, tensor in read_header(file).items() if name != "__metadata__"}
    if not header:
        raise LoadProblem(f"{file} holds no tensors")
    for name, tensor in sorted(header.items()):
        parts = name.split(".")
        if parts[-1] in _LEGACY or "original_layer" in parts:
            raise _legacy(file, name)
        if tensor["dtype"] not in _DTYPES:
            raise LoadProblem(f"{file}: tensor {name} is {tensor['dtype']}; expected one of {', '.join(_DTYPES)}")
    return {name: tuple(tensor["shape"]) for name, tensor in header.items()}


def _parameters(file: Path, given: Any) -> tuple[int, float, list[str] | None]:
    """Rank, scale and keys."""
    if not isinstance(given, dict):
        raise LoadProblem(f"{file} has lora_parameters {given!r}; expected an object with rank and scale")
    for key in given:
        if key not in _PARAMETERS:
            hint = "; this mlx-lm takes scale instead" if key == "alpha" else ""
            raise LoadProblem(
                f"{file} has lora_parameters.{key}, which mlx-lm does not apply{hint}; "
                f"the keys are {', '.join(_PARAMETERS)}"
            )
    rank: Any = given.get("rank")
    scale: Any = given.get("scale")
    keys: Any = given.get("keys")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise LoadProblem(f"{file} has lora_parameters.rank {rank!r}; expected 1 to {MAX_RANK}")
    if not _is_number(scale):
        raise LoadProblem(f"{file} has lora_parameters.scale {scale!r}; expected a number")
    dropout = given.get("dropout", 0.0)
    if not _is_number(dropout) or not 0.0 <= dropout <= 1.0:
        raise LoadProblem(f"{file} has lora_parameters.dropout {dropout!r}; expected 0 to 1")
    if keys is not None and not (isinstance(keys, list) and keys and all(isinstance(k, str) and k for k in keys)):
        raise LoadProblem(f"{file} has lora_parameters.keys {keys!r}; expected a list of module names")
    return rank, float(scale), keys


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _identity(folder: Path) -> str:
    """A hash over both files: they are small beside the model, and what is kept of prompts hangs on them."""
    digest = hashlib.blake2b(digest_size=32)
    for file in (folder / CONFIG, folder / WEIGHTS):
        try:
            with file.open("rb") as stream:
                digest.update(os.fstat(stream.fileno()).st_size.to_bytes(8, "little"))
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
        except OSError as error:
            raise LoadProblem(f"cannot read {file}: {error.strerror or error}") from None
    return digest.hexdigest()


def _unsupported(what: str) -> LoadProblem:
    return LoadProblem(
        f"{what}; only LoRA and DoRA adapters of mlx-lm are loaded ({CONFIG} with lora_parameters, {WEIGHTS}): "
        "train or convert it with mlx_lm.lora, or fuse it into a model",
        ErrorCode.UNSUPPORTED,
    )


def _legacy(file: Path, sign: str) -> LoadProblem:
    return _unsupported(f"{file} is of mlx-vlm's LoRaLayer format ({sign}): A and B instead of lora_a and lora_b")
