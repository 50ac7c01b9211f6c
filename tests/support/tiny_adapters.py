"""Owns the adapters of the tests: random ones in mlx-lm's own format, built by it, strong enough to be seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def make_adapter(
    folder: Path,
    model: Path,
    *,
    kind: str = "lora",
    seed: int = 1,
    rank: int = 4,
    scale: float = 8.0,
    num_layers: int = -1,
    keys: list[str] | None = None,
) -> Path:
    """Write a random adapter of a model into `folder` and return it."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    network, _ = load_model(model)
    parameters: dict[str, Any] = {"rank": rank, "scale": scale, "dropout": 0.05}
    if keys is not None:
        parameters["keys"] = keys
    network.freeze()
    linear_to_lora_layers(network, num_layers, parameters, use_dora=kind == "dora")
    key = mx.random.key(seed)
    weights: dict[str, mx.array] = {}
    flat: Any = tree_flatten(network.trainable_parameters())
    for index, (name, value) in enumerate(sorted(flat)):
        if name.endswith(".m"):
            noise = mx.random.uniform(0.8, 1.25, value.shape, key=mx.random.split(key, 1000)[index])
            weights[name] = value * noise
        else:
            weights[name] = 0.1 * mx.random.normal(value.shape, key=mx.random.split(key, 1000)[index])
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    # mlx-lm leaves all of its training arguments there.
    config = {
        "fine_tune_type": kind,
        "num_layers": num_layers,
        "lora_parameters": parameters,
        "iters": 600,
        "model": "somewhere",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
