"""Opens a model: checks the directory, imports the library, loads weights and tokenizer, tells what it found.

Runs on the executor thread. Nothing heavy is imported before the directory has passed its check, and a local
path never touches the network. Whatever goes wrong becomes a `LoadProblem` that names the file.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol.commands import Load
from ...protocol.errors import ErrorCode
from ...protocol.values import Limits, WorkerInfo
from ..faults import is_out_of_memory
from ..model_check import check_model, read_config, read_generation_config, resolve_model, weight_bytes
from .base import Engine, LoadProblem, Report
from .reasons import short

if TYPE_CHECKING:
    from ..memory.caps import Caps

_log = logging.getLogger(__name__)
_PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "dflash-mlx", "transformers", "llguidance")
_GROUP_BYTES = 256 * 1024 * 1024
"""Weights evaluated between two progress reports."""


def open_engine(load: Load, report: Report) -> Engine:
    """The engine for a load command. Raises `LoadProblem`."""
    began = time.perf_counter()
    path = resolve_model(load.model)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if path is None:
        from .hub import download

        path = download(load.model, report)
    elif load.draft is None or resolve_model(load.draft.model) is not None:
        # Read when the library is imported; without it a local tokenizer may still ask the hub.
        os.environ["HF_HUB_OFFLINE"] = "1"
    if load.draft is not None:
        # On CUDA a plan is made for each length of the KV cache, and blocks meet new lengths all the time.
        os.environ.setdefault("MLX_CUDA_USE_CUDNN_SDPA", "0")
    report("checking", 0, 0)
    check_model(path)
    report("importing", 0, 0)
    with _quiet():
        before_import = time.perf_counter()
        _import_library(path)
        import_seconds = time.perf_counter() - before_import
        return _open(load, path, report, began, import_seconds)


def _open(load: Load, path: Path, report: Report, began: float, import_seconds: float) -> Engine:
    from ..cache.store import make_store
    from ..memory.caps import apply_caps
    from ..memory.device import measure
    from ..memory.watch import make_keeper
    from ..text.templates import describe
    from .adapters import Adapters
    from .batch import can_batch
    from .dflash.opening import WITH_ADAPTER, make_engine, open_draft
    from .grouped import Groups
    from .hub import download
    from .kv import KVCaches
    from .live import Facts
    from .prepare import Preparer
    from .seeing import Seeing
    from .text import TextEngine
    from .vision import check_options, is_vision, load_vision, vision_preparer, why_blind

    config = read_config(path)
    eyes = is_vision(path, config)
    blind = why_blind(load) if eyes and _is_text(path, config, load) else ""
    seeing = eyes and not blind
    if seeing:
        check_options(load)
    else:
        _check_architecture(path, config, load.trust_remote_code)
    if load.size > 1:
        raise LoadProblem(
            f"rank {load.rank} of {load.size}: distributed models are not built yet; load it with size 1",
            ErrorCode.UNSUPPORTED,
        )
    caps = apply_caps(load.memory_limit)
    memory_before = measure()
    report("tokenizer", 0, 0)
    tokenizer = _load_tokenizer(path, load)  # first, since it fails sooner than a large model loads
    sight, weights = None, 0
    if seeing:
        try:
            sight, weights = load_vision(path, load, lambda model: _settle(path, model, report, caps))
        except LoadProblem as problem:
            if problem.code is ErrorCode.OUT_OF_MEMORY or not _is_text(path, config, load):
                raise
            blind = problem.message
            _log.warning("text only, since %s", blind)
    model: Any = sight
    if sight is None:
        model, weights = _load_weights(path, load.trust_remote_code, report, caps)
    generation = read_generation_config(path)
    caches = KVCaches(model, load)
    vocabulary, filled = _warm_up(path, model, caches.make)
    adapters = Adapters(model, load, caches.make, caps.memory)
    eos = frozenset(int(token) for token in tokenizer.eos_token_ids) | _ids(generation, "eos_token_id")
    versions = _versions()
    together = can_batch(caches.make()) and (sight is None or sight.batchable)
    kept = caches.make if sight is None else (lambda: list(sight.bare(caches.make())))
    filled = filled if sight is None else sight.bare(filled)
    store = make_store(load, caps.memory, path, versions, kept, filled)
    facts = Facts(
        model=model,
        vocabulary=vocabulary,
        eos=eos,
        make_cache=caches.make,
        spared=tuple(sorted(t for t in eos | _newline(tokenizer) if 0 <= t < vocabulary)),
        sight=sight,
        banned=tuple(sorted(t for t in _ids(generation, "suppress_tokens") if 0 <= t < vocabulary)),
    )
    opened = open_draft(load, path, facts, config, caps.backend, report, lambda name: download(name, report))
    keeper = make_keeper(load, caps, model, kept(), filled, store)
    lines, dims = keeper.lines, keeper.dims
    info = WorkerInfo(
        engine="text" if sight is None else "vision",
        model_type=config["model_type"],
        backend=caps.backend,
        vocab_size=vocabulary,
        load_seconds=time.perf_counter() - began,
        import_seconds=import_seconds,
        memory_before=memory_before,
        memory_after=measure(),
        limits=Limits(
            context_tokens=_context_limit(load.context_limit, config),
            # A model whose caches cannot be merged serves one row at a time, and says so.
            max_running=load.max_running if together and not load.deterministic else 1,
            max_queued=load.max_queued,
            memory_bytes=caps.memory,
            wired_bytes=caps.wired,
            cache_bytes=caps.cache,
            enforced_by=caps.enforced_by,
            soft_bytes=lines.soft if lines else 0,
            hard_bytes=lines.hard if lines else 0,
            unsupported=list(caps.unsupported),
        ),
        template=describe(tokenizer, load.chat_template is not None),
        versions=versions,
        kv_cache=caches.info,
        adapters=adapters.infos,
        speculation=opened.info if opened is not None else None,
        weight_bytes=weights,
        kv_token_bytes=math.ceil(dims.token_bytes) if dims else 0,
    )
    limit = info.limits.context_tokens
    preparer = (
        Preparer(tokenizer, vocabulary, limit, facts.eos, blind)
        if sight is None
        else vision_preparer(load, tokenizer, vocabulary, limit, facts.eos, sight)
    )

    def make() -> TextEngine:
        engine = TextEngine(info, facts, preparer, caps, keeper, store)
        if opened is not None:
            engine.plain_because = opened.info.reason or WITH_ADAPTER
        return engine

    base = make()
    if opened is not None and opened.pair is not None:
        base = make_engine(opened, base, facts, load, path, tokenizer)
    return (Groups if sight is None else Seeing)(base, make, preparer, adapters)


def _import_library(path: Path) -> None:
    try:
        import mlx_lm.generate
        import mlx_lm.utils  # noqa: F401
    except Exception as error:
        raise LoadProblem(f"cannot import mlx-lm to load {path}: {short(error)}") from error


def _check_architecture(path: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    from mlx_lm.utils import MODEL_REMAPPING

    file = path / "config.json"
    if (custom := config.get("model_file")) is not None:
        if not trust_remote_code:
            raise LoadProblem(
                f"{file} names a model_file ({custom}), code that would run in the worker; "
                "load with trust_remote_code if you trust it"
            )
        return
    kind = str(config["model_type"])
    module: str = MODEL_REMAPPING.get(kind, kind)
    if not module.isidentifier() or importlib.util.find_spec(f"mlx_lm.models.{module}") is None:
        version = importlib.metadata.version("mlx-lm")
        raise LoadProblem(f"{file} has model_type {kind!r}, which mlx-lm {version} does not know")


def _is_text(path: Path, config: dict[str, Any], load: Load) -> bool:
    """Whether mlx-lm can serve a model, without its eyes if it has some."""
    try:
        _check_architecture(path, config, load.trust_remote_code)
    except LoadProblem:
        return False
    return True


def _load_weights(path: Path, trust_remote_code: bool, report: Report, caps: Caps) -> tuple[Any, int]:
    """The model with all weights in memory, and their bytes."""
    from mlx_lm.utils import load_model

    try:
        model, _ = load_model(path, lazy=True, trust_remote_code=trust_remote_code)
        return model, _settle(path, model, report, caps)
    except LoadProblem:
        raise
    except Exception as error:
        code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.LOAD_FAILED
        raise LoadProblem(f"cannot load the weights in {path}: {short(error)}", code) from error


def _settle(path: Path, model: Any, report: Report, caps: Caps) -> int:
    """Bring all weights into memory; gives their bytes. Evaluated in groups: a slow load shows that it moves."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    total = weight_bytes(path)
    report("weights", 0, total)
    done, size, group = 0, 0, []
    flat: Any = tree_flatten(model.parameters())
    for _, value in flat:
        group.append(value)
        size += value.nbytes
        if size >= _GROUP_BYTES:
            mx.eval(group)
            done, size, group = done + size, 0, []
            _check_room(path, caps)
            # Loading may convert weights, so their sizes in memory and on disk can differ.
            report("weights", min(done, total), total)
    mx.eval(group, model.parameters())
    _check_room(path, caps)
    report("weights", total, total)
    return done + size


def _check_room(path: Path, caps: Caps) -> None:
    """Raises `LoadProblem` when the model does not fit into the worker's own limit."""
    from ..memory.device import measure

    used = measure()
    size = max(used.mlx_active, used.footprint)
    if not caps.memory or size <= caps.memory:
        return
    raise LoadProblem(
        f"the weights in {path} do not fit: {size / 2**20:,.1f} MiB are in use, {used.mlx_active / 2**20:,.1f} MiB "
        f"of them by MLX, and the memory limit is {caps.memory / 2**20:,.1f} MiB; load the model with a larger "
        "memory_limit, or one that is smaller or quantised to fewer bits",
        ErrorCode.OUT_OF_MEMORY,
    )


def _load_tokenizer(path: Path, load: Load) -> Any:
    from mlx_lm.utils import load_config, load_tokenizer

    from ..text.templates import OWN_TEMPLATE
    from .template_files import own_template, probe_template

    extra: dict[str, Any] = {"trust_remote_code": load.trust_remote_code}
    if load.chat_template is not None:
        # The second key, if a checkpoint has it, names a renderer that would go before any template.
        extra |= {"chat_template": load.chat_template, "chat_template_type": None}
    try:
        tokenizer = load_tokenizer(path, extra, eos_token_ids=load_config(path).get("eos_token_id"))
    except Exception as error:
        raise LoadProblem(f"cannot load the tokenizer in {path}: {short(error)}") from error
    if load.chat_template is not None:
        probe_template(tokenizer)
        setattr(tokenizer, OWN_TEMPLATE, own_template(path))
    return tokenizer


def _warm_up(path: Path, model: Any, make_cache: Callable[[], list[Any]]) -> tuple[int, list[Any]]:
    """Run one token through the model; gives the width of its logits, the real vocabulary, and its caches."""
    import mlx.core as mx
    from mlx_lm.generate import generation_stream

    try:
        with mx.stream(generation_stream):
            cache = make_cache()
            logits = model(mx.array([[0]]), cache=cache)
            mx.eval(logits)
    except Exception as error:
        raise LoadProblem(f"the model in {path} fails on its first token: {short(error)}") from error
    return int(logits.shape[-1]), cache


def _context_limit(asked: int | None, config: dict[str, Any]) -> int:
    """The smaller of both limits; 0 when neither is known, and then nothing is checked."""
    nested = config.get("text_config")
    own = config.get("max_position_embeddings")
    if own is None and isinstance(nested, dict):
        own = nested.get("max_position_embeddings")
    known = [limit for limit in (asked, own) if isinstance(limit, int) and limit > 0]
    return min(known, default=0)


def _newline(tokenizer: Any) -> frozenset[int]:
    return frozenset(tokenizer.encode("\n", add_special_tokens=False))


def _ids(config: dict[str, Any], key: str) -> frozenset[int]:
    value = config.get(key)
    values = value if isinstance(value, list) else [value]
    return frozenset(item for item in values if isinstance(item, int) and not isinstance(item, bool))


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Library chatter goes to the log or to stderr; stdout stays clean."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("always")
        yield
    for warning in caught:
        _log.debug("%s: %s", warning.category.__name__, warning.message)
