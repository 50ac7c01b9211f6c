"""Who may import whom, and which dangerous thing may be done where."""

from __future__ import annotations

import sys
from collections.abc import Callable

from .source import ROOT, Source, read, sources

ZMQ_FILES = (
    "worker/channel.py",
    "orchestrator/channel.py",
    "orchestrator/frontdoor.py",
    "orchestrator/client_io.py",
    "orchestrator/tap.py",
)
"""The only files that touch sockets."""

MODEL_PLACES = (
    "worker/engines/",
    "worker/memory/",
    "worker/text/",
    "worker/cache/",
    "worker/vision/",
    "worker/demo/",
    "worker/demo_model.py",
)
"""The only places that may import MLX, tokenizers or arrays."""
MODEL_MODULES = (
    "mlx",
    "mlx_lm",
    "mlx_vlm",
    "dflash_mlx",
    "transformers",
    "tokenizers",
    "llguidance",
    "numpy",
    "torch",
    "PIL",
)

PROCESS_PLACES = ("orchestrator/spawn.py", "orchestrator/cli/")
"""The only places that start, signal or reap processes. The command line does it for its demo and doctor."""
PROCESS_CALLS = (
    "os.kill",
    "os.killpg",
    "os.system",
    "os.popen",
    "os.posix_spawn",
    "os.posix_spawnp",
    "os.waitpid",
    "signal.pthread_kill",
    "signal.pidfd_send_signal",
    "asyncio.create_subprocess_exec",
    "asyncio.create_subprocess_shell",
)

NOWHERE = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing", "pty", "ctypes.util")
CALLED_NOWHERE = ("eval", "exec", "compile", "os.fork", "os.forkpty", "os.execv", "os.execve", "os.execvp")


def offenders(find: Callable[[Source], set[str]], outside: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """What each file outside of some places has that it should not."""
    found = {source.path: find(source) for source in sources() if not source.path.startswith(outside)}
    return {path: what for path, what in found.items() if what}


def test_protocol_needs_the_standard_library_and_msgspec_only() -> None:
    def foreign(source: Source) -> set[str]:
        if source.package != "protocol":
            return set()
        others = source.imports_any("mlx_bulkhead") - source.imports_any("mlx_bulkhead.protocol")
        return others | (source.top_level - sys.stdlib_module_names - {"msgspec", "mlx_bulkhead"})

    assert not offenders(foreign)


def test_worker_and_orchestrator_never_meet() -> None:
    assert not offenders(lambda source: source.imports_any("mlx_bulkhead.worker"), ("worker/",))
    others = ("orchestrator/", "mlx_bulkhead/")
    assert not offenders(lambda source: source.imports_any("mlx_bulkhead.orchestrator"), others)


def test_packages_import_each_other_by_relative_names() -> None:
    """`import worker` would be another package's on a user's machine."""
    assert not offenders(lambda source: source.imports_any("worker", "orchestrator", "protocol", "tests"))


def test_sockets_are_in_the_channel_files_only() -> None:
    assert not offenders(lambda source: source.imports_any("zmq"), ZMQ_FILES)


def test_models_are_in_the_worker_only() -> None:
    assert not offenders(lambda source: source.imports_any(*MODEL_MODULES), MODEL_PLACES)


def test_processes_are_handled_in_one_place() -> None:
    assert not offenders(
        lambda source: source.imports_any("subprocess") | (source.calls & set(PROCESS_CALLS)) | source.signals,
        PROCESS_PLACES,
    )


def test_some_things_are_done_nowhere() -> None:
    assert not offenders(lambda source: source.imports_any(*NOWHERE) | (source.calls & set(CALLED_NOWHERE)))


def test_only_the_front_package_computes_what_it_imports() -> None:
    """Everywhere else an import that these tests cannot read would be a hole in them."""
    assert not offenders(lambda source: source.imports & {"<computed>"}, ("mlx_bulkhead/", *MODEL_PLACES))


def test_the_reader_sees_every_form_of_import() -> None:
    """The rules above are worth what the reader sees."""
    sample = ROOT / "tests" / "architecture" / "sample.txt"
    seen = read(sample)
    assert {
        "a",
        "b.c",
        "d",
        "d.e",
        "mlx_bulkhead.tests.f",
        "mlx_bulkhead.tests.architecture.g",
    } <= seen.imports
    assert {"h.i", "<computed>", "inner"} <= seen.imports
    assert {"os.kill", "eval", "().terminate", "asyncio.create_subprocess_exec"} <= seen.calls
    assert seen.signals == {"().kill", "process.terminate"}
