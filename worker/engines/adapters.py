"""Owns the adapters of a model: their layers, built once around the model's own, and which are in the model now.

They come with the load, or are added and dropped between two steps.

`switch` puts modules into the model's tree and takes others out. A graph that was built before keeps the arrays that
it was built with, so what is being computed does not change. Executor thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generation_stream
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from ...protocol import limits
from ...protocol.checks_names import BASE
from ...protocol.commands import Load
from ...protocol.errors import ErrorCode
from ...protocol.values import AdapterInfo
from .adapter_files import WEIGHTS, AdapterFiles, pick_adapter, read_adapter
from .base import Refused
from .reasons import short

_WRAPPED = ("linear", "embedding")
"""Under which names a layer of an adapter holds the model's own."""
_SHOWN = 3
"""Names in a message; of more their number."""


class Place(NamedTuple):
    """Where a layer of an adapter goes: `parent[key]`, and what is there without it."""

    parent: Any
    key: Any
    own: Any
    layer: Any


class Adapters:
    """All adapters of a model. At first, the base model is in force."""

    def __init__(self, model: Any, load: Load, make_cache: Callable[[], list[Any]], memory: int = 0) -> None:
        """`memory`: limit in bytes, 0 for none. Raises `LoadProblem`."""
        self._model = model
        self._make_cache = make_cache
        self._memory = memory
        self._default = "" if load.adapter == BASE else load.adapter
        self._infos: dict[str, AdapterInfo] = {}
        self._places: dict[str, list[Place]] = {"": []}
        self._salts: dict[str, str] = {}
        self._folders: dict[str, Path] = {}
        self._now = ""
        for one in [read_adapter(name, Path(folder)) for name, folder in load.adapters.items()]:
            self._take(one)

    @property
    def infos(self) -> list[AdapterInfo]:
        """What there is, in the order in which it came. A new list each time."""
        return list(self._infos.values())

    def add(self, name: str, folder: Path) -> None:
        """One more. The base model is in force then. Raises `LoadProblem`, and then nothing is changed.

        What is there already under this name, from this directory and these files, stays as it is.
        """
        files = read_adapter(name, folder)
        if name in self._salts:
            if folder == self._folders[name] and _salt(files) == self._salts[name]:
                return
            what = "with other files" if folder == self._folders[name] else f"from {self._folders[name]}"
            raise files.problem(
                f"the model has one of this name {what}; drop it first, or choose another name", ErrorCode.BAD_REQUEST
            )
        if len(self._infos) >= limits.MAX_ADAPTERS:
            text = f"the model has {len(self._infos)} adapters; the limit is {limits.MAX_ADAPTERS}"
            raise files.problem(text, ErrorCode.BAD_REQUEST)
        size, active = (folder / WEIGHTS).stat().st_size, mx.get_active_memory()
        if 0 < self._memory < active + size:
            raise files.problem(
                f"it takes {size / limits.MIB:.1f} MiB, and {active / limits.MIB:.1f} of the "
                f"{self._memory / limits.MIB:.1f} MiB that the model may take are in use; drop another one, or load "
                "the model with a higher memory_limit",
                ErrorCode.OUT_OF_MEMORY,
            )
        self.switch("")
        self._take(files)

    def drop(self, name: str) -> None:
        """Let one go that no row has. The base model is in force then. Raises `Refused`."""
        pick_adapter(name, self._salts, "")
        if name == self._default:
            text = f"adapter {name!r} serves the requests that name none: it came as the default of the load"
            raise Refused(ErrorCode.BAD_REQUEST, text)
        self.switch("")
        for kept in (self._infos, self._places, self._salts, self._folders):
            del kept[name]

    def pick(self, asked: str | None) -> str:
        """The adapter of a request, empty for the base model. Raises `Refused`."""
        return pick_adapter(asked, self._salts, self._default)

    def salt(self, name: str, tenant: str) -> str:
        """What separates kept prefixes: of the base model by tenant, of an adapter by its files too."""
        return tenant if name == "" else self._salts[name] + tenant

    def switch(self, name: str) -> None:
        """Put an adapter in force; empty: the base model."""
        if name == self._now:
            return
        for place in self._places[self._now]:
            place.parent[place.key] = place.own
        for place in self._places[name]:
            place.parent[place.key] = place.layer
        self._now = name

    def _take(self, files: AdapterFiles) -> None:
        """Build the layers and try them. With a problem, nothing of it stays."""
        places, size = _build(self._model, files)
        self._places[files.name] = places
        try:
            self._try(files)
        except BaseException:
            del self._places[files.name]
            raise
        self._salts[files.name], self._folders[files.name] = _salt(files), files.folder
        self._infos[files.name] = AdapterInfo(
            files.name, files.kind, files.rank, len(places), size, files.name == self._default
        )

    def _try(self, files: AdapterFiles) -> None:
        """One token really goes through."""
        self.switch(files.name)
        try:
            with mx.stream(generation_stream):
                mx.eval(self._model(mx.array([[0]]), cache=self._make_cache()))
        except (ValueError, TypeError, AttributeError, LookupError, NotImplementedError) as error:
            raise files.problem(f"the model fails on its first token with it: {short(error)}") from error
        finally:
            self.switch("")


def _salt(files: AdapterFiles) -> str:
    """Longer than any tenant, so that none can be named like it."""
    return files.identity.ljust(limits.MAX_NAME_CHARS + 1, ".")


def _build(model: Any, files: AdapterFiles) -> tuple[list[Place], int]:
    """The layers of an adapter with its weights, and their bytes. The model is left as it was."""
    before: dict[str, Any] = dict(model.named_modules())
    parameters: dict[str, Any] = {"rank": files.rank, "scale": files.scale, "dropout": 0.0}
    if files.keys is not None:
        parameters["keys"] = set(files.keys)
    places: dict[str, Place] = {}
    try:
        linear_to_lora_layers(model, files.num_layers, parameters, use_dora=files.kind == "dora")
    except Exception as error:
        raise files.problem(f"{files.kind} cannot be had of this model: {short(error)}") from error
    finally:
        for path, layer in model.named_modules():
            if path in before and layer is not before[path]:
                parent, key = _seat(model, path)
                places[path] = Place(parent, key, before[path], layer)
        for place in places.values():
            place.parent[place.key] = place.own
    _check_modules(files, places)
    _check_tensors(files, places, before)
    return list(places.values()), _fill(files, places)


def _seat(model: Any, path: str) -> tuple[Any, Any]:
    """The container of a module, and its key there."""
    *parents, last = path.split(".")
    container = model
    for part in parents:
        container = container[int(part) if isinstance(container, list) else part]
    return container, int(last) if isinstance(container, list) else last


def _check_modules(files: AdapterFiles, places: dict[str, Place]) -> None:
    """Each key names something, and what it names can have such a layer."""
    where = f"the last {files.num_layers} layers" if files.num_layers > 0 else "the layers"
    for key in files.keys or ():
        if not any(path == key or path.endswith(f".{key}") for path in places):
            raise files.problem(f"lora_parameters.keys has {key!r}, which is no module in {where} of this model")
    if not places:
        raise files.problem(f"it names no module in {where} of this model")
    for path, place in places.items():
        if isinstance(place.layer, DoRAEmbedding) and isinstance(place.own, nn.QuantizedEmbedding):
            what = f"{path} is a quantised embedding, of which mlx-lm computes DoRA wrongly; use LoRA for it"
            raise files.problem(what, ErrorCode.UNSUPPORTED)


def _check_tensors(files: AdapterFiles, places: dict[str, Place], modules: dict[str, Any]) -> None:
    """The file has just the tensors that the layers need, in their shapes."""
    needed = {f"{path}.{name}": shape for path, place in places.items() for name, shape in _needed(place)}
    file, found = files.folder / WEIGHTS, files.shapes
    if foreign := sorted(name for name in found if name not in needed):
        gone = [name for name in foreign if name.rpartition(".")[0] not in modules]
        why = f"this model has no module for {_some(gone)}" if gone else f"{_some(foreign)} belong to no layer of it"
        raise files.problem(f"{file} has {len(foreign)} of {len(found)} tensors that do not belong: {why}")
    if missing := sorted(name for name in needed if name not in found):
        raise files.problem(f"{file} lacks {len(missing)} of {len(needed)} tensors: {_some(missing)}")
    for name, shape in needed.items():
        if found[name] != shape:
            raise files.problem(f"{file}: {name} has the shape {found[name]}, this model needs {shape}")


def _needed(place: Place) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a layer's own parameters."""
    shapes = {name: tuple(value.shape) for name, value in _own(place.layer)}
    if isinstance(place.layer, DoRALinear) and isinstance(place.own, nn.QuantizedLinear):
        # The library counts whole values in a word, which is wrong for 3, 5 and 6 bits.
        width = place.own["scales"].shape[-1] * place.own.group_size
        shapes["lora_a"] = (width, shapes["lora_a"][1])
    return list(shapes.items())


def _own(layer: Any) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(layer.parameters())
    return [(name, value) for name, value in flat if name.split(".", 1)[0] not in _WRAPPED]


def _fill(files: AdapterFiles, places: dict[str, Place]) -> int:
    """Give the layers their weights; gives their bytes."""
    file = files.folder / WEIGHTS
    try:
        weights: Any = mx.load(str(file), format="safetensors")
    except Exception as error:
        raise files.problem(f"cannot read {file}: {short(error)}") from error
    for path, place in places.items():
        own = [(name, weights[f"{path}.{name}"]) for name, _ in _own(place.layer)]
        place.layer.update(tree_unflatten(own))
        place.layer.eval()
    finite = {name: mx.all(mx.isfinite(value)) for name, value in weights.items()}
    mx.eval(weights, finite)
    if bad := sorted(name for name, whole in finite.items() if not whole.item()):
        raise files.problem(f"{file} has values that are not finite, in {_some(bad)}")
    return sum(value.nbytes for value in weights.values())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
