"""What a caller may set on `load` and `generate`, and the commands made from it. Pure.

The one door between loose Python arguments and strict commands: every caller's mistake becomes a `BadRequest`
here, in the words that the wire decoder would use, before anything is sent. The command made shares no object
with its caller.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypedDict, TypeVar, cast

from ..protocol import checks, codec
from ..protocol.commands import AddAdapter, Command, DropAdapter, Generate, Load
from ..protocol.errors import BadRequest, TooLarge, error_for
from ..protocol.values import ChatMessage, Draft, OnCrash, Part, ResponseFormat, Speculative


class GenerateOptions(TypedDict, total=False):
    """Options of one generation; `protocol.commands.Generate` says what each means. Give exactly one of
    `prompt`, `tokens` and `messages`."""

    prompt: str | None
    tokens: Sequence[int] | None
    messages: Sequence[ChatMessage | Mapping[str, Any]] | None
    tools: Sequence[Mapping[str, Any]] | None
    template_args: Mapping[str, Any] | None
    max_tokens: int | None
    temperature: float | None
    top_p: float
    top_k: int
    min_p: float
    xtc_probability: float
    xtc_threshold: float
    seed: int | None
    stop: Sequence[str] | str | None
    logit_bias: Mapping[int, float] | None
    repetition_penalty: float
    repetition_window: int
    presence_penalty: float
    frequency_penalty: float
    logprobs: bool
    top_logprobs: int
    response_format: ResponseFormat | Mapping[str, Any] | None
    stream_interval: int
    deadline_s: float | None
    on_crash: OnCrash
    detached: bool
    tenant: str
    cache: bool
    channels: bool
    continue_final: bool
    adapter: str | None
    speculative: Speculative
    images: Sequence[Part | Mapping[str, Any] | bytes | os.PathLike[str]]


class LoadOptions(TypedDict, total=False):
    """Options of one load; `protocol.commands.Load` says what each means."""

    context_limit: int | None
    memory_limit: int | None
    trust_remote_code: bool
    chat_template: str | None
    max_running: int
    max_queued: int
    env: Mapping[str, str]
    stall_budget_s: float
    recycle_requests: int | None
    recycle_age_s: float | None
    recycle_footprint: int | None
    deterministic: bool
    cache_entries: int
    cache_bytes: int | None
    cache_disk_bytes: int
    cache_dir: str | os.PathLike[str] | None
    kv_bits: int | None
    kv_group_size: int
    max_kv_size: int | None
    rank: int
    size: int
    adapters: Mapping[str, str | os.PathLike[str]]
    adapter: str
    draft: Draft | str | os.PathLike[str] | Mapping[str, Any] | None
    memory_soft: float
    memory_hard: float
    memory_off: Sequence[str]
    max_images: int
    max_image_bytes: int
    max_image_pixels: int
    image_max_side: int | None
    image_dirs: Sequence[str | os.PathLike[str]]
    image_urls: bool


GENERATE_OPTIONS: Final = tuple(GenerateOptions.__annotations__)
LOAD_OPTIONS: Final = tuple(LoadOptions.__annotations__)

_MESSAGE_KEYS: Final = ChatMessage.__struct_fields__
_PART_KEYS: Final = Part.__struct_fields__
_FORMAT_KEYS: Final = ResponseFormat.__struct_fields__
_FOREIGN_PARTS: Final = ("image_url", "input_image", "input_audio", "input_text", "file", "video")

_short = reprlib.Repr()  # never the whole of a prompt of megabytes
_short.maxlevel = 4
_short.maxstring = _short.maxother = 60

_C = TypeVar("_C", bound=Command)


def make_generate(model: str, options: GenerateOptions) -> Generate:
    """The checked command for a generation. Raises `BadRequest`, or `TooLarge` for a frame over the limit."""
    fields = _fields(options, GENERATE_OPTIONS, "generate")
    if fields.get("messages") is not None:
        fields["messages"] = _messages(fields["messages"])
    if isinstance(images := fields.get("images"), (list, tuple)):
        fields["images"] = [_picture(image, f"images[{index}]") for index, image in enumerate(images)]
    if isinstance(form := fields.get("response_format"), Mapping):
        fields["response_format"] = _known_keys(form, _FORMAT_KEYS, "response_format")
    request = _through_the_wire(Generate, {"model": model, **fields})
    _raise_if(checks.check_generate(request))
    return request


def make_load(name: str, model: str | os.PathLike[str], options: LoadOptions) -> Load:
    """The checked command for a load. A local path becomes absolute: the worker has its own directory."""
    fields = _fields(options, LOAD_OPTIONS, "load")
    folder = fields.get("cache_dir")
    if folder is not None:
        fields["cache_dir"] = _folder(folder)
    if isinstance(adapters := fields.get("adapters"), Mapping):
        fields["adapters"] = {name: _folder(folder) for name, folder in adapters.items()}
    if (draft := fields.get("draft")) is not None:
        fields["draft"] = _draft(draft)
    if isinstance(folders := fields.get("image_dirs"), (list, tuple)):
        fields["image_dirs"] = [_folder(folder) for folder in folders]
    load = _through_the_wire(Load, {"name": name, "model": local_path(model), **fields})
    _raise_if(checks.check_load(load))
    return load


def make_add_adapter(model: str, name: str, path: str | os.PathLike[str]) -> AddAdapter:
    """The checked command that adds an adapter. Its directory becomes absolute."""
    command = _through_the_wire(AddAdapter, {"model": model, "name": name, "path": _folder(path)})
    _raise_if(checks.check(command))
    return command


def make_drop_adapter(model: str, name: str) -> DropAdapter:
    """The checked command that drops an adapter."""
    command = _through_the_wire(DropAdapter, {"model": model, "name": name})
    _raise_if(checks.check(command))
    return command


def encode_command(command: Command) -> bytes:
    """The body of a command, checked as the receiver will check it. Raises `BadRequest` or `TooLarge`."""
    try:
        body = codec.encode_body(command)
        if not isinstance(command, (Generate, Load)):  # those come checked from above
            codec.decode_body(codec.kind_of(type(command)), codec.NO_REQUEST, body)
    except codec.FrameError as error:
        raise error_for(error.code, str(error)) from None
    if not isinstance(command, (Generate, Load)):
        _raise_if(checks.check(command))
    return body


def local_path(model: str | os.PathLike[str]) -> str:
    """A path made absolute when it is one: it exists, or is written like one. A hub id stays as it is."""
    if isinstance(model, os.PathLike):
        return os.path.abspath(os.path.expanduser(os.fspath(model)))
    if not isinstance(model, str) or not model or "\0" in model:  # refused later, in better words
        return model
    expanded = os.path.expanduser(model)
    if model.startswith((".", "/", "~")) or _exists(expanded):
        return os.path.abspath(expanded)
    return model


def _draft(draft: Any) -> Any:
    """A draft, given as a model's name alone or with its options; a local path becomes absolute."""
    if isinstance(draft, Draft):
        draft = {name: getattr(draft, name) for name in Draft.__struct_fields__}
    if isinstance(draft, Mapping):
        fields = _known_keys(draft, Draft.__struct_fields__, "draft")
        return {**fields, "model": local_path(fields["model"])} if fields.get("model") is not None else fields
    return {"model": local_path(draft)}


def _folder(path: Any) -> Any:
    """A folder, absolute. What cannot be one is left to the checks."""
    if not isinstance(path, (str, os.PathLike)) or not path:
        return path
    return os.path.abspath(os.path.expanduser(os.fspath(path)))


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except ValueError:  # lone surrogates that the file system encoding refuses
        return False


def closest(name: object, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for a misspelt name, or nothing."""
    from difflib import get_close_matches  # 3 ms that only a mistake costs

    matches = get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _fields(options: Mapping[str, Any], known: tuple[str, ...], verb: str) -> dict[str, Any]:
    for name in options:
        if name not in known:
            raise BadRequest(
                f"unknown option {name!r} of {verb}{closest(name, known)}; the options are {', '.join(known)}"
            )
    return dict(options)


def _through_the_wire(cls: type[_C], fields: dict[str, Any]) -> _C:
    """Encode and decode: one set of rules and of words for Python callers and for frames."""
    kind = codec.kind_of(cls)
    try:
        body = codec.encode_body(cls(**fields))
    except codec.FrameError as error:
        _explain_encoding(cls, fields, error)
    try:
        return cast(_C, codec.decode_body(kind, codec.NO_REQUEST, body))
    except codec.FrameError as error:
        message = str(error)
        _, _, path = message.partition("`$.")
        raise BadRequest(message + _value_at(fields, path.rstrip("`"))) from None


def _explain_encoding(cls: type[Command], fields: dict[str, Any], error: codec.FrameError) -> NoReturn:
    """Raise with the field that cannot be encoded; a frame that is too large only as a whole names none."""
    required = {name: "" for name in ("name", "model") if name in fields}
    for name, value in fields.items():
        try:
            codec.encode_body(cls(**{**required, name: value}))
        except codec.FrameError as wrong:
            if isinstance(wrong, codec.FrameTooLarge):
                raise TooLarge(f"{name}: {wrong}") from None
            raise BadRequest(f"{name}: {wrong}{_shown(value)}") from None
    raise TooLarge(str(error)) from None


def _value_at(fields: dict[str, Any], path: str) -> str:
    """` (got 'x')` for the top-level field of a decoder's path such as `messages[0].role`."""
    name = path.split(".", 1)[0].split("[", 1)[0]
    return _shown(fields[name]) if name in fields else ""


def _shown(value: object) -> str:
    """A value in an error message, short whatever it is."""
    try:
        text = _short.repr(value).encode("ascii", "backslashreplace").decode()
    except Exception:  # a foreign __repr__ may raise anything
        text = f"a {type(value).__name__}"
    return f" (got {text[:160]})"


def _messages(messages: Any) -> Any:
    """The caller's messages, copied where a path must change. What is no message is left to the decoder."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        return messages
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> Any:
    if isinstance(message, ChatMessage):
        content = message.content
        fields = {name: getattr(message, name) for name in _MESSAGE_KEYS}
    elif isinstance(message, Mapping):
        content = message.get("content")
        fields = _known_keys(message, _MESSAGE_KEYS, where)
    else:
        return message
    if isinstance(content, (list, tuple)):
        fields["content"] = [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    return fields


def _picture(image: Any, where: str) -> Any:
    """An attached picture: the bytes of its file, a path, or a part."""
    if isinstance(image, (bytes, bytearray, memoryview)):
        return {"type": "image", "data": bytes(image)}
    if isinstance(image, os.PathLike):
        return _part({"type": "image", "path": image}, where)
    return _part(image, where)


def _part(part: Any, where: str) -> Any:
    if isinstance(part, Part):
        fields = {name: getattr(part, name) for name in _PART_KEYS}
    elif isinstance(part, Mapping):
        if part.get("type") in _FOREIGN_PARTS:
            raise BadRequest(
                f"{where}.type {part['type']!r} is another API's; give a text as "
                '{"type": "text", "text": …}, an image as {"type": "image", "data": bytes}, '
                '{"type": "image", "path": …} or {"type": "image", "url": …}'
            )
        fields = _known_keys(part, _PART_KEYS, where)
    else:
        return part
    path = fields.get("path")
    if isinstance(path, (str, os.PathLike)):
        fields["path"] = os.path.abspath(os.path.expanduser(os.fspath(path)))
    return fields


def _known_keys(given: Mapping[Any, Any], known: tuple[str, ...], where: str) -> dict[Any, Any]:
    for key, value in given.items():
        if key not in known and value is not None:  # a null of another API's message says nothing
            raise BadRequest(
                f"{where} has an unknown key {key!r}{closest(key, known)}; the keys are {', '.join(known)}"
            )
    return {key: value for key, value in given.items() if key in known}


def _raise_if(problem: checks.Problem | None) -> None:
    if problem is not None:
        raise error_for(problem.code, problem.message)


def differing_options(old: Load, new: Load) -> str:
    """Names of the options in which two loads of one name differ."""
    return ", ".join(f for f in old.__struct_fields__ if f != "name" and getattr(old, f) != getattr(new, f))
