"""Owns the tiny drafts of the tests: random DFlash drafts for the tiny models, as dflash-mlx reads them.

A random draft guesses wrong nearly always. What is accepted comes from the library's copying of repeated text, so
tests that want accepted tokens use prompts whose greedy text repeats.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def make_draft(directory: Path, target: Path, *, block: int = 8, seed: int = 0, **changes: Any) -> Path:
    """Write a random draft of one layer for the model in `target` into `directory`, and return it.

    changes: fields of its config.json that are to be others.
    """
    import mlx.core as mx
    from dflash_mlx.model import DFlashDraftModel, DFlashDraftModelArgs
    from mlx.utils import tree_flatten

    own: dict[str, Any] = json.loads((target / "config.json").read_text())
    config = {
        "model_type": "gemma4_text" if own["model_type"].startswith("gemma4") else "qwen3",
        "architectures": ["DFlashDraftModel"],
        "hidden_size": own["hidden_size"],
        "num_hidden_layers": 1,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": own["vocab_size"],
        "max_position_embeddings": own["max_position_embeddings"],
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "num_target_layers": own["num_hidden_layers"],
        "block_size": block,
        "layer_types": ["full_attention"],
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2]},
        **changes,
    }
    directory.mkdir(parents=True, exist_ok=True)
    model = DFlashDraftModel(DFlashDraftModelArgs.from_dict(config))
    weights: dict[str, Any] = {}
    flat: Any = tree_flatten(model.parameters())
    for index, (name, value) in enumerate(sorted(flat)):
        key = mx.random.key(seed * 100_003 + index)
        weights[name] = value if value.ndim < 2 else value.shape[1] ** -0.5 * mx.random.normal(value.shape, key=key)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return directory
