"""Acts: fetches a model from the Hugging Face hub. The only place that may touch the network."""

from __future__ import annotations

import threading
from pathlib import Path

from .base import LoadProblem, Report
from .reasons import short

_PATTERNS = ["*.json", "model*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py"]


def download(model: str, report: Report) -> Path:
    """The local snapshot of a Hugging Face id. Raises `LoadProblem`, also when there is no network.

    Reports bytes on disk, and only while their number grows, so that a stalled download looks like one.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    report("downloading", 0, 0)
    result: list[Path | Exception] = []

    def fetch() -> None:
        try:
            result.append(Path(snapshot_download(model, allow_patterns=_PATTERNS)))
        except Exception as error:
            result.append(error)

    # A thread of its own for the download; reports leave from the caller's thread.
    thread = threading.Thread(target=fetch, name="download", daemon=True)
    thread.start()
    blobs = Path(HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "blobs"
    before = 0
    while thread.is_alive():
        thread.join(1.0)
        done = _bytes_in(blobs)
        if done != before:
            before = done
            report("downloading", done, 0)
    outcome = result[0]
    if isinstance(outcome, Exception):
        raise LoadProblem(
            f"{model} is not a directory here, and could not be fetched from the Hugging Face hub: "
            f"{type(outcome).__name__}: {short(outcome)}"
        ) from outcome
    return outcome


def _bytes_in(directory: Path) -> int:
    total = 0
    for file in directory.glob("*"):
        try:
            total += file.stat().st_size
        except OSError:  # renamed in between
            continue
    return total
