"""The TOML file of a daemon or an embedding application, validated.

An error names the file, the key's path, the value and what is allowed. Paths are relative to the file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from ..protocol import checks, limits
from ..protocol.commands import Generate, Load
from ..protocol.errors import BadRequest
from ..protocol.values import Draft
from .memory_config import GroupConfig, MemoryConfig, Wish, check_ranges
from .options import LOAD_OPTIONS, LoadOptions, closest, local_path, make_load
from .policy.lifecycle_values import Budgets
from .policy.restart import RestartPolicy

Seconds = Annotated[float, Meta(ge=0.01, le=86_400)]
_S = TypeVar("_S", bound=msgspec.Struct)


class ConfigError(BadRequest):
    """The configuration cannot be read or holds a bad value."""


class DefaultsConfig(msgspec.Struct, frozen=True):
    """`[defaults]`: what a request gets that leaves the field open. None: what `protocol.limits` says."""

    max_tokens: int | None = None
    temperature: float | None = None
    deadline_s: float | None = None


class LimitsConfig(msgspec.Struct, frozen=True):
    """`[limits]`: bounds and times of the orchestrator. Times in seconds."""

    max_clients: Annotated[int, Meta(ge=1, le=65_536)] = 64
    max_requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    """Requests that may be waiting or running, all models together."""
    keepalive_s: Annotated[float, Meta(ge=0.01, le=2.0)] = 0.5
    """Silence of a live request after which the orchestrator says that it lives. Clients give up on 5 s."""
    hello_s: Seconds = 60.0
    """From the start of a worker's process to its first message."""
    load_silence_s: Seconds = 600.0
    """Longest silence of a load; every progress starts it anew."""
    polite_s: Seconds = 2.0
    """From asking a worker to end to SIGTERM."""
    term_s: Seconds = 2.0
    """From SIGTERM to SIGKILL."""
    drain_s: Seconds = 30.0
    """For running requests, when a model is unloaded with drain."""
    spare_workers: Annotated[int, Meta(ge=0, le=16)] = 0
    """Workers kept ready with their libraries imported, so that a restart costs the model's load time only."""
    shutdown_grace_s: Seconds = 5.0
    """For the whole daemon to end; then workers are killed."""

    def budgets(self) -> Budgets:
        """What the lifecycle of a worker is told of them."""
        return Budgets(
            hello_s=self.hello_s,
            load_silence_s=self.load_silence_s,
            polite_s=self.polite_s,
            term_s=self.term_s,
            drain_s=self.drain_s,
        )


class ModelConfig(msgspec.Struct, frozen=True):
    """`[models.NAME]`: a model that clients may name. Loaded when first asked for, or at start with `preload`."""

    model: str
    """A path, absolute or relative to the file, or a Hugging Face id."""
    preload: bool = False
    context_limit: int | None = None
    memory_limit: int | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    max_running: int = 32
    max_queued: int = 256
    stall_budget_s: float = 60.0
    recycle_requests: int | None = None
    recycle_age_s: float | None = None
    recycle_footprint: int | None = None
    deterministic: bool = False
    cache_entries: int = 64
    cache_bytes: int | None = None
    cache_disk_bytes: int = 0
    cache_dir: str | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    max_kv_size: int | None = None
    rank: int = 0
    size: int = 1
    adapters: dict[str, str] = {}
    """Name → directory, relative to the file."""
    adapter: str = ""
    draft: Draft | str | None = None
    """A path, absolute or relative to the file, or a Hugging Face id; or a table that has it as `model`."""
    memory_soft: float = 0.85
    memory_hard: float = 0.95
    memory_off: list[str] = []
    max_images: int = limits.DEFAULT_IMAGES
    max_image_bytes: int = limits.DEFAULT_IMAGE_BYTES
    max_image_pixels: int = limits.DEFAULT_IMAGE_PIXELS
    image_max_side: int | None = None
    image_dirs: list[str] = []
    """Relative to the file."""
    image_urls: bool = False
    env: dict[str, str] = {}
    """Environment variables of the worker, such as `LD_PRELOAD`."""
    pin: bool = False
    """Once loaded it never makes room for another, nor leaves because it is idle."""
    ttl_s: float | None = None
    """Idle seconds after which it is unloaded. None: `memory.ttl_s`."""
    group: str = ""
    """One of `memory.groups`, which bounds how many of them are loaded at once."""

    @property
    def wish(self) -> Wish:
        """What it asks of placement."""
        return Wish(self.ttl_s, self.pin, self.preload, self.group)

    def load(self, name: str) -> Load:
        """The command that loads it. Raises `BadRequest`."""
        options = cast(LoadOptions, {option: getattr(self, option) for option in LOAD_OPTIONS})
        return make_load(name, self.model, options)


class Config(msgspec.Struct, frozen=True):
    """The whole configuration."""

    run_dir: Path | None = None
    """For sockets, logs and notes. None: `$BULKHEAD_RUN_DIR`, else the user's default; embedded, a temporary one."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    keep_awake: bool = False
    """Keep the host from idle sleep while a request is live or a model loads."""
    defaults: DefaultsConfig = DefaultsConfig()
    limits: LimitsConfig = LimitsConfig()
    restart: RestartPolicy = RestartPolicy()
    memory: MemoryConfig = MemoryConfig()
    models: dict[str, ModelConfig] = {}

    @classmethod
    def default(cls) -> Config:
        """No model, and the defaults for all else."""
        return cls()

    def request_defaults(self) -> dict[str, object]:
        """The fields of a request that are filled in when it leaves them open."""
        return {key: value for key, value in msgspec.structs.asdict(self.defaults).items() if value is not None}


_RESTART_RANGES: Final = {
    "max_restarts": (0, 1000),
    "window_s": (0.01, 86_400),
    "base_delay_s": (0.0, 86_400),
    "max_delay_s": (0.0, 86_400),
    "jitter": (0.0, 1.0),
    "retry_failed_s": (0.0, 86_400),
    "stable_steps": (1, 1_000_000_000),
}


def load_config(path: Path | str) -> Config:
    """Read and check a file. Raises `ConfigError`."""
    path = Path(path).expanduser()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    try:
        return parse_config(table, path.absolute().parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None


def parse_config(table: Mapping[str, Any], base: Path) -> Config:
    """Check a parsed file whose paths are relative to `base`. Raises `ConfigError`."""
    config = _struct(Config, table, "")
    models = {name: _located(model, base) for name, model in config.models.items()}
    run_dir = None if config.run_dir is None else base / config.run_dir.expanduser()
    config = msgspec.structs.replace(config, models=models, run_dir=run_dir)
    _check_ranges(config)
    return config


def _located(model: ModelConfig, base: Path) -> ModelConfig:
    """A model whose path no longer depends on a directory."""
    folder = model.cache_dir
    if folder:
        folder = os.path.normpath(base / os.path.expanduser(folder))
    adapters = {
        name: os.path.normpath(base / os.path.expanduser(path)) if path else path
        for name, path in model.adapters.items()
    }
    pictures = [os.path.normpath(base / os.path.expanduser(path)) if path else path for path in model.image_dirs]
    return msgspec.structs.replace(
        model,
        model=_placed(model.model, base),
        cache_dir=folder,
        adapters=adapters,
        draft=_located_draft(model.draft, base),
        image_dirs=pictures,
    )


def _located_draft(draft: Draft | str | None, base: Path) -> Draft | None:
    if draft is None:
        return None
    if isinstance(draft, str):
        draft = Draft(draft)
    return msgspec.structs.replace(draft, model=_placed(draft.model, base))


def _placed(model: str, base: Path) -> str:
    """A path within `base`, if there is such a thing or it is written like one; else what it was."""
    inside = base / os.path.expanduser(model)
    is_path = model.startswith((".", "/", "~")) or (model != "" and os.path.exists(inside))
    return os.path.normpath(inside) if is_path else local_path(model)


def _check_ranges(config: Config) -> None:
    defaults = config.defaults
    probe = Generate(
        model="m",
        prompt="p",
        max_tokens=defaults.max_tokens,
        temperature=defaults.temperature,
        deadline_s=defaults.deadline_s,
    )
    if problem := checks.check_generate(probe):
        raise ConfigError(f"defaults.{problem.message}")
    for key, (low, high) in _RESTART_RANGES.items():
        value = getattr(config.restart, key)
        if not low <= value <= high:  # false for NaN too
            raise ConfigError(f"restart.{key} is {value}: it must be {low:g} to {high:g}")
    if words := check_ranges(config.memory, {name: one.wish for name, one in config.models.items()}):
        raise ConfigError(words)
    for name, model in config.models.items():
        try:
            model.load(name)
        except BadRequest as error:
            raise ConfigError(f"models.{_key(name)}: {error.message}") from None


def _struct(cls: type[_S], table: object, where: str) -> _S:
    """A struct from a table, key by key, so that every error knows its path."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} is {table!r}: it must be a table")
    fields = {field.name: field for field in msgspec.structs.fields(cls)}
    for key in table:
        if key not in fields:
            raise ConfigError(
                f"unknown key {_path(where, key)}{closest(key, fields)}; allowed are {', '.join(fields)}"
            )
    values: dict[str, Any] = {}
    for name, field in fields.items():
        path = _path(where, name)
        if name in table:
            values[name] = _value(field.type, table[name], path)
        elif field.required:
            raise ConfigError(f"{path} is missing")
    return cls(**values)


def _value(kind: Any, value: object, path: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _struct(kind, value, path)
    for tables in (ModelConfig, GroupConfig):
        if kind == dict[str, tables]:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path} is {value!r}: it must hold tables, [{path}.NAME]")
            return {name: _struct(tables, table, _path(path, name)) for name, table in value.items()}
    if kind == dict[str, str] and isinstance(value, Mapping):
        return {key: _value(str, item, _path(path, key)) for key, item in value.items()}
    if kind == Path | None and isinstance(value, str) and value:
        return Path(value)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        words = str(error).split(" - at ")[0].replace("`", "")
        raise ConfigError(f"{path} is {value!r}: {words[:1].lower()}{words[1:]}{_choices(kind)}") from None


def _choices(kind: Any) -> str:
    if getattr(kind, "__origin__", None) is Literal:
        return f"; allowed are {', '.join(kind.__args__)}"
    return ""


def _path(where: str, key: object) -> str:
    return f"{where}.{_key(key)}" if where else _key(key)


def _key(key: object) -> str:
    """A key as TOML would write it."""
    text = str(key)
    bare = text.isascii() and text.replace("-", "a").replace("_", "a").isalnum()
    return text if bare else f'"{text}"'
