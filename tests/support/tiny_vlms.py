"""Owns the tiny vision models of the tests: random weights, real mlx-vlm directories with real processors.

The language side is made as in `tiny_models`. The vision side has unit-scale projections, so that two pictures give
two different texts. Nothing is fetched: each family's processor reads the files written here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support import tiny_models

IMAGE_MARKS = {
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "smolvlm": "<image>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma4": "<|image|>",
}
"""What a picture is in the text that each family's template makes."""

_EXTRA = {
    "qwen2_vl": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "gemma3": ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    "smolvlm": (
        "<image>",
        "<fake_token_around_image>",
        "<global-img>",
        "<end_of_utterance>",
        *(f"<row_{row}_col_{col}>" for row in (1, 2, 3) for col in (1, 2, 3)),
    ),
    "qwen3_vl": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "qwen3_5": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "gemma4": ("<|image|>", "<|image>", "<image|>", "<|video|>"),
}
_IMAGE_TOKEN = {
    "qwen2_vl": "<|image_pad|>",
    "gemma3": "<image_soft_token>",
    "smolvlm": "<image>",
    "qwen3_vl": "<|image_pad|>",
    "qwen3_5": "<|image_pad|>",
    "gemma4": "<|image|>",
}
FAMILIES = tuple(IMAGE_MARKS)

_TIED = {"gemma3": 0.1, "gemma4": 0.02}
"""mlx-vlm ties the heads of these. Embeddings are so much smaller there, so that a token does not predict itself."""

_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- 'MARK' }}{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# As SmolVLM's and others': content is always a list of parts, a string would be lost without a word.
_LIST_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- 'MARK' }}{%- elif part.type == 'text' %}{{- part.text }}{%- endif %}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}


def make_tiny_vlm(
    directory: Path,
    *,
    family: str = "qwen2_vl",
    seed: int = 0,
    vocab_size: int = 2048,
    max_pixels: int = 28 * 28 * 16,
) -> Path:
    """Write a random vision model of `family` into `directory` and return it. Float32.

    max_pixels: to which a Qwen processor shrinks a picture; one token each 28 x 28 of them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_models._train_tokenizer(vocab_size, _EXTRA[family])
    eos, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    image = tokenizer.token_to_id(_IMAGE_TOKEN[family])
    text = {**_TEXT, "vocab_size": vocab_size}
    config = {
        "model_type": family,
        "vocab_size": vocab_size,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": "float32",
        **_config(family, text, tokenizer, image),
    }
    quiet = sorted({*tiny_models._quiet_ids(tokenizer, vocab_size), image})
    _save_weights(directory, config, quiet, seed)
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", {"eos_token_id": eos, "pad_token_id": pad})
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (_LIST_TEMPLATE if family == "smolvlm" else _TEMPLATE).replace("MARK", IMAGE_MARKS[family])
    special = {}
    if family == "gemma4":
        names = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
        special = {"extra_special_tokens": names}
    if family == "gemma3":
        special = {
            "extra_special_tokens": {
                "image_token": "<image_soft_token>",
                "boi_token": "<start_of_image>",
                "eoi_token": "<end_of_image>",
            }
        }
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
            "chat_template": template,
            **special,
        },
    )
    for name, value in _processor(family, max_pixels).items():
        _write(directory / name, value)
    return directory


def _config(family: str, text: dict[str, Any], tokenizer: Any, image: int) -> dict[str, Any]:
    text = {**text, "tie_word_embeddings": family in _TIED}
    siglip = {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "patch_size": 14,
        "image_size": 56,
        "num_channels": 3,
    }
    if family == "qwen2_vl":
        return {
            **text,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
            "image_token_id": image,
            "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
            "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
            "vision_config": {
                "model_type": "qwen2_vl",
                "depth": 2,
                "embed_dim": 64,
                "hidden_size": text["hidden_size"],
                "num_heads": 2,
                "patch_size": 14,
                "spatial_patch_size": 14,
            },
        }
    if family == "gemma3":
        window = {"sliding_window": 64, "sliding_window_pattern": 3, "query_pre_attn_scalar": 32, "head_dim": 32}
        return {
            "hidden_size": text["hidden_size"],
            "image_token_index": image,
            "text_config": {**text, **window, "model_type": "gemma3_text", "mm_tokens_per_image": 4},
            "vision_config": siglip,
        }
    if family == "smolvlm":
        return {
            "image_token_id": image,
            "scale_factor": 2,
            "text_config": {**text, "model_type": "llama"},
            "vision_config": siglip,
        }
    if family == "gemma4":
        # Tokens of a picture see each other both ways, layers share caches, and each has inputs of its own.
        return {
            "hidden_size": text["hidden_size"],
            "image_token_id": image,
            "boi_token_id": tokenizer.token_to_id("<|image>"),
            "eoi_token_id": tokenizer.token_to_id("<image|>"),
            "text_config": {
                **text,
                "model_type": "gemma4_text",
                "num_hidden_layers": 4,
                "head_dim": 32,
                "global_head_dim": 32,
                "num_kv_shared_layers": 1,
                "hidden_size_per_layer_input": 16,
                "vocab_size_per_layer_input": text["vocab_size"],
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                "use_bidirectional_attention": "vision",
                "use_double_wide_mlp": False,
            },
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "global_head_dim": 32,
                "patch_size": 8,
                "default_output_length": 70,
            },
        }
    deep = family == "qwen3_vl"
    if deep:
        language = {"model_type": "qwen3_vl_text", "rope_scaling": {"type": "default", "mrope_section": [4, 6, 6]}}
    else:
        language = {
            "model_type": "qwen3_5_text",
            **tiny_models._ARCHITECTURES["qwen3_5"],
            "rope_parameters": {
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
            "num_hidden_layers": 4,
        }
    return {
        "image_token_id": image,
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "text_config": {**text, "head_dim": 32, **language},
        "vision_config": {
            "model_type": family,
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "out_hidden_size": text["hidden_size"],
            "num_heads": 2,
            "patch_size": 14,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1] if deep else [],
        },
    }


def _processor(family: str, max_pixels: int) -> dict[str, dict[str, Any]]:
    if family == "gemma4":
        size = {"patch_size": 8, "max_soft_tokens": 70, "pooling_kernel_size": 3}
        return {"processor_config.json": {"image_processor": size, "processor_class": "Gemma4Processor"}}
    mean = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    if family.startswith("qwen"):
        return {
            "preprocessor_config.json": {
                **mean,
                "patch_size": 14,
                "merge_size": 2,
                "temporal_patch_size": 2,
                "min_pixels": 28 * 28,
                "max_pixels": max_pixels,
                "image_processor_type": "Qwen2VLImageProcessor",
            }
        }
    if family == "gemma3":
        return {
            "preprocessor_config.json": {
                **mean,
                "image_processor_type": "Gemma3ImageProcessor",
                "processor_class": "Gemma3Processor",
                "size": {"height": 56, "width": 56},
            },
            "processor_config.json": {"image_seq_length": 4, "processor_class": "Gemma3Processor"},
        }
    return {
        "preprocessor_config.json": {
            **mean,
            "image_processor_type": "Idefics3ImageProcessor",
            "processor_class": "SmolVLMProcessor",
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 56},
            "do_image_splitting": True,
            "do_pad": True,
        },
        "processor_config.json": {"image_seq_len": 4, "processor_class": "SmolVLMProcessor"},
    }


def _save_weights(directory: Path, config: dict[str, Any], quiet: list[int], seed: int) -> None:
    import importlib

    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.utils import update_module_configs

    module = importlib.import_module(f"mlx_vlm.models.{config['model_type']}")
    config = json.loads(json.dumps(config))
    made = update_module_configs(
        module.ModelConfig.from_dict(config), module, config, ["text", "vision", "perceiver", "projector", "audio"]
    )
    model = module.Model(made)
    flat: Any = tree_flatten(model.parameters())
    weights = {}
    for index, (name, value) in enumerate(sorted(flat, key=lambda item: item[0])):
        key = mx.random.key(seed * 100_003 + index)
        weights[name] = tiny_models._initial(mx, name, value, key).astype(mx.float32)
        if name.endswith("mm_input_projection_weight"):
            # Gemma scales what comes from pictures down before it scales all embeddings up.
            weights[name] = weights[name] * config["hidden_size"] ** 0.5
        tied = name.endswith("language_model.model.embed_tokens.weight") and config["model_type"] in _TIED
        if tied:
            weights[name] = weights[name] * _TIED[config["model_type"]]
        if tied or name.endswith("lm_head.weight"):
            weights[name][mx.array(quiet)] = 0
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
