"""The configuration file: what is read, and errors that name the key, the value and what is allowed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from mlx_bulkhead.orchestrator.config import Config, ConfigError, ModelConfig, load_config
from mlx_bulkhead.orchestrator.options import LOAD_OPTIONS
from mlx_bulkhead.protocol.commands import Load


def read(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "bulkhead.toml"
    file.write_text(text, encoding="utf-8")
    return load_config(file)


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert read(tmp_path, "") == Config.default() == Config()


def test_everything_is_read(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    config = read(
        tmp_path,
        """
        run_dir = "run"
        log_level = "debug"
        keep_awake = true
        [defaults]
        max_tokens = 100
        temperature = 1
        [limits]
        max_clients = 3
        keepalive_s = 0.2
        [restart]
        max_restarts = 0
        [models.small]
        model = "weights"
        preload = true
        context_limit = 2048
        cache_disk_bytes = 1000000
        cache_dir = "prompts"
        adapters = { legal = "legal", other = "/adapters/other" }
        adapter = "legal"
        memory_soft = 0.5
        memory_off = ["drop"]
        image_dirs = ["pictures", "/srv/pictures"]
        max_images = 4
        env = { LD_PRELOAD = "libopenblas.so.0" }
        [models."org/hub"]
        model = "org/hub"
        [models.twin]
        model = "./weights"
        """,
    )
    assert config.run_dir == tmp_path / "run"
    assert config.keep_awake
    assert config.limits.max_clients == 3
    assert config.restart.max_restarts == 0
    assert config.request_defaults() == {"max_tokens": 100, "temperature": 1.0}
    small = config.models["small"]
    assert small.preload
    assert small.load("small") == Load(
        "small",
        str(tmp_path / "weights"),
        context_limit=2048,
        cache_disk_bytes=1_000_000,
        cache_dir=str(tmp_path / "prompts"),
        adapters={"legal": str(tmp_path / "legal"), "other": "/adapters/other"},
        adapter="legal",
        memory_soft=0.5,
        memory_off=["drop"],
        image_dirs=[str(tmp_path / "pictures"), "/srv/pictures"],
        max_images=4,
        env={"LD_PRELOAD": "libopenblas.so.0"},
    )
    assert config.models["org/hub"].load("org/hub").model == "org/hub"
    assert config.models["twin"].model == small.model


def test_a_model_has_all_options_of_a_load_with_the_same_defaults() -> None:
    assert set(ModelConfig.__struct_fields__) == {"model", "preload", "pin", "ttl_s", "group", *LOAD_OPTIONS}
    assert ModelConfig("org/x").load("a") == Load("a", "org/x")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("limit = 3", ["unknown key limit", "did you mean 'limits'", "allowed are", "models"]),
        ("[limits]\nmax_client = 3", ["unknown key limits.max_client", "'max_clients'"]),
        ("[limits]\nmax_clients = 0", ["limits.max_clients is 0", ">= 1"]),
        ("[limits]\nmax_clients = true", ["limits.max_clients is True", "int"]),
        ("[limits]\nkeepalive_s = nan", ["limits.keepalive_s is nan"]),
        ("[restart]\njitter = 2", ["restart.jitter is 2.0", "0 to 1"]),
        ("[restart]\nstable_steps = 0", ["restart.stable_steps is 0", "1 to 1e+09"]),
        ("[restart]\nmax_delay_s = nan", ["restart.max_delay_s is nan"]),
        ("[defaults]\ntemperature = -1", ["defaults.temperature", "-1", "0 to 100"]),
        ("[defaults]\nmax_tokens = 0", ["defaults.max_tokens", "got 0"]),
        ('log_level = "loud"', ["log_level is 'loud'", "debug, info, warning, error"]),
        ("run_dir = 5", ["run_dir is 5"]),
        ("limits = 5", ["limits is 5", "table"]),
        ("models = 5", ["models is 5", "[models.NAME]"]),
        ("[models]\na = 5", ["models.a is 5", "table"]),
        ("[models.a]", ["models.a.model is missing"]),
        ('[models.a]\nmodel = "x"\nenv = { A = 5 }', ["models.a.env.A is 5", "str"]),
        ('[models.a]\nmodel = "x"\ncontext_limit = 0', ["models.a: context_limit", "got 0"]),
        ('[models." b"]\nmodel = "x"', ['models." b"', "blanks"]),
        ('[models.a]\nmodel = ""', ["models.a", "model must be"]),
        ("a = 1\nx = = 2", ["not valid TOML", "line 2"]),
        ('[models.a]\nmodel="x"\n[models.a]\nmodel="y"', ["not valid TOML"]),
    ],
)
def test_an_error_names_key_value_and_what_is_allowed(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    for word in ["bulkhead.toml", *words]:
        assert word in caught.value.message


def test_a_missing_file_and_a_file_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read.*No such file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "binary.toml")


def test_the_configuration_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Config().limits.max_clients = 5  # pyright: ignore[reportAttributeAccessIssue]
    assert msgspec.structs.asdict(Config())["models"] == {}
