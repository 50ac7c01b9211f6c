"""Pictures through the whole chain: the right pixels reach the model, and every bad one is an answer of its own."""

from __future__ import annotations

import io
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.orchestrator.cli.app import run
from PIL import Image

from mlx_bulkhead import AsyncClient, BadRequest, Client, Orchestrator, TooLarge, Unsupported, WorkerCrashed
from tests.integration.conftest import Daemon, start_daemon, stop_daemon
from tests.support.tiny_vlms import make_tiny_vlm

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "What is this?"}], "max_tokens": 24}


def png(colour: str, size: tuple[int, int] = (80, 60)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vlm(tmp_path_factory.mktemp("vlm"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An allowed folder, with good files and bad ones, beside one that is not allowed."""
    folder = tmp_path_factory.mktemp("pictures") / "in"
    folder.mkdir()
    for colour in ("red", "blue"):
        (folder / f"{colour}.png").write_bytes(png(colour))
    (folder / "half.png").write_bytes(png("red")[:60])
    (folder / "text.png").write_text("hello")
    (folder / "empty.png").write_bytes(b"")
    (folder.parent / "secret.png").write_bytes(png("red"))
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    frames = [Image.new("RGB", (80, 60), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:], duration=50)
    return folder


@pytest.fixture(scope="module")
def vision(tiny_vlm: Path, pictures: Path) -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="bh-", dir="/tmp") as folder:
        running = start_daemon(Path(folder) / "run")
        with running.client() as client:
            client.load("eye", tiny_vlm, image_dirs=[pictures], image_urls=True, max_images=4)
        yield running
        stop_daemon(running)


def test_the_picture_decides_the_answer(vision: Daemon, pictures: Path, tmp_path: Path) -> None:
    with vision.client() as client:
        red = client.complete("eye", images=[png("red")], **ASK)
        assert red.engine == "vision"
        assert red.usage.prompt_tokens > 8
        assert client.complete("eye", images=[png("blue")], **ASK).tokens != red.tokens
        assert client.complete("eye", **ASK).tokens != red.tokens
        by_path = client.complete("eye", images=[pictures / "red.png"], **ASK)
        assert by_path.tokens == red.tokens
        assert by_path.usage.cached_tokens == red.usage.prompt_tokens - 1
        parts = [{"type": "image", "path": pictures / "red.png"}, {"type": "text", "text": "What is this?"}]
        message = {"role": "user", "content": parts}
        assert client.complete("eye", messages=[message], max_tokens=24).tokens == red.tokens
        assert message == {"role": "user", "content": parts}
        assert parts[0]["path"] == pictures / "red.png"
        # Once more under the same path, with another picture in it.
        changing = pictures / "changing.png"
        shutil.copy(pictures / "red.png", changing)
        assert client.complete("eye", images=[changing], **ASK).tokens == red.tokens
        shutil.copy(pictures / "blue.png", changing)
        blue = client.complete("eye", images=[changing], **ASK)
        assert blue.tokens == client.complete("eye", images=[png("blue")], **ASK).tokens != red.tokens


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "truncated": ({"name": "half.png"}, BadRequest, "image 1 .* cannot be decoded"),
    "text named .png": ({"name": "text.png"}, BadRequest, "is none of PNG"),
    "0 bytes": ({"name": "empty.png"}, BadRequest, r"is empty \(0 bytes\)"),
    "a directory": ({"name": "."}, BadRequest, "is a directory"),
    "a link out": ({"name": "link.png"}, BadRequest, "may not be read: image_dirs allows"),
    "another folder": ({"name": "../secret.png"}, BadRequest, "may not be read"),
    "missing": ({"name": "nothing.png"}, BadRequest, "No such file"),
    "20 images": ({"images": [png("red")] * 20}, TooLarge, "has 20 images and this model takes 4"),
    "unreachable": ({"url": "http://nothing.invalid/a.png"}, BadRequest, "cannot be fetched"),
    "private": ({"url": "http://127.0.0.1:1/a.png"}, BadRequest, "not a public address"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures_are_typed_errors_and_the_next_request_is_fine(
    vision: Daemon, pictures: Path, name: str
) -> None:
    given, error, words = BAD[name]
    images: Any = given.get("images") or [
        {"type": "image", "url": given["url"]} if "url" in given else pictures / given["name"]
    ]
    with vision.client() as client:
        with pytest.raises(error, match=words):
            client.complete("eye", images=images, **ASK)
        assert len(client.complete("eye", images=[png("red")], **ASK).tokens) == 24
        assert len(client.complete("eye", **ASK).tokens) == 24


def test_20000_by_20000_pixels(vision: Daemon) -> None:
    stream = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(stream, "PNG")
    with vision.client() as client:
        with pytest.raises(TooLarge, match="20000 x 20000 = 400000000 pixels and the limit is 50000000"):
            client.complete("eye", images=[stream.getvalue()], **ASK)
        assert client.complete("eye", **ASK).finish_reason == "length"


def test_an_animation_is_its_first_frame(vision: Daemon, pictures: Path) -> None:
    with vision.client() as client:
        moving = client.complete("eye", images=[pictures / "moving.gif"], **ASK)
        assert moving.tokens == client.complete("eye", images=[png("red")], **ASK).tokens


def test_a_text_model_refuses(daemon: Daemon) -> None:
    with daemon.client() as client:
        with pytest.raises(Unsupported, match="this model takes text only"):
            client.complete("tiny", images=[png("red")], **ASK)
        assert client.complete("tiny", **ASK).finish_reason == "length"


def test_the_command_line(vision: Daemon, pictures: Path, capfd: pytest.CaptureFixture[str]) -> None:
    where = ["--run-dir", str(vision.run_dir), "--max-tokens", "24"]
    assert run(["run", "eye", "What is this?", "--image", str(pictures / "red.png"), *where]) == 0
    out = capfd.readouterr().out
    with vision.client() as client:
        assert out.rstrip("\n") == client.complete("eye", images=[png("red")], **ASK).text.rstrip("\n")
    assert run(["run", "eye", "x", "--image", str(pictures / "nothing.png"), *where]) != 0
    assert "--image: cannot read" in capfd.readouterr().err
    assert run(["run", "eye", "x", "--raw", "--image", str(pictures / "red.png"), *where]) != 0


async def test_embedded_and_the_async_client(vision: Daemon, tiny_vlm: Path, short_tmp: Path) -> None:
    async with AsyncClient(vision.run_dir) as client:
        red = await client.complete("eye", images=[png("red")], **ASK)
    async with Orchestrator(run_dir=short_tmp / "run") as own:
        await own.load("eye", tiny_vlm)
        assert (await own.complete("eye", images=[png("red")], **ASK)).tokens == red.tokens
        with pytest.raises(BadRequest, match="image_dirs is empty"):
            await own.complete("eye", images=[Path("/tmp/a.png")], **ASK)


def kill(client: Client) -> None:
    [model] = [model for model in client.stats("eye").models if model.name == "eye"]
    assert model.pid is not None
    os.kill(model.pid, signal.SIGKILL)


def test_a_killed_worker_goes_on_with_the_same_pictures(own_daemon: Daemon, tiny_vlm: Path, tmp_path: Path) -> None:
    """Bytes come with the request. What lies in a file may have changed: that answer is not continued."""
    (tmp_path / "red.png").write_bytes(png("red"))
    asked = {**ASK, "max_tokens": 200}
    with own_daemon.client() as client:
        client.load("eye", tiny_vlm, image_dirs=[tmp_path])
        whole = client.complete("eye", images=[png("red")], **asked)
        bytes_given = client.generate("eye", images=[png("red")], **asked)
        path_given = client.generate("eye", images=[tmp_path / "red.png"], **asked)
        for stream in (bytes_given, path_given):
            next(snap for snap in stream if len(snap.tokens) > 0)
        kill(client)
        result = bytes_given.result()
        assert result.restarts == 1
        assert result.tokens == whole.tokens
        assert result.text == whole.text
        with pytest.raises(WorkerCrashed, match="may have changed, so the answer is not continued"):
            path_given.result()
        assert client.complete("eye", images=[tmp_path / "red.png"], **asked).tokens == whole.tokens
