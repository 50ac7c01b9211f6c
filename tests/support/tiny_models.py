"""Owns the tiny models of the tests: random weights, real mlx-lm directories, made in a second or two.

Greedy text of a random network tends to fall into a loop of one token or to hit a special token. Here:
  * the output head is never tied to the embeddings, so a token does not predict itself;
  * embeddings have unit scale and queries are scaled up, so attention is sharp and history matters;
  * head rows of tokens that are not printable text by themselves (special tokens, parts of a UTF-8
    sequence, control characters, unused ids) are zero: their logit is 0 where the best of some thousand
    others is far above, so greedy text never takes them and sampled text at temperature 1 rarely does.
So greedy text runs to max_tokens; a test that needs the end of text uses a stop string or a logit bias.
"""

from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
BREAKAGES = (
    "truncated",
    "zero_bytes",
    "missing_shard",
    "unknown_architecture",
    "gguf_only",
    "no_tokenizer",
    "bad_config_json",
    "wrong_shape",
)

# Trained on as it is: some English, Czech, Chinese, Japanese, Korean, emoji, code and digits.
CORPUS = """
The lamp on the harbour wall goes out at seven, and the boats come back one after another with the tide.
A careful engineer keeps a spare key, writes down what she changed, and tests the brakes before the hill.
Nobody in the village remembers who planted the walnut trees, but everybody has an opinion about the nuts.
When the water rises, close the doors between the compartments; one flooded room must not sink the ship.
Please describe the weather, the answer, the question, the number, the colour and the name of the river.
Ráno jsme šli přes most k mlýnu, kde stará paní krmila kachny a vyprávěla příběhy o povodni.
Žluté listí padalo na dlažbu, děti běžely domů a z komína stoupal kouř. Kolik stojí lístek do města?
Dobrý den, prosím vás, kdy jede příští vlak? Odpověď je jednoduchá: až napíše výpravčí čas na tabuli.
今天下午我们去河边散步，看见两只白鸟站在石头上。请告诉我这个问题的答案和你的名字。
明日の朝、駅前の店でパンを買ってから、図書館で本を読みます。天気がよければ歩いて行きましょう。
오늘은 비가 와서 집에서 차를 마시며 편지를 썼습니다. 내일은 산에 올라갈 거예요.
🙂 🚢 🌊 🔥 🎉 🐍 🦀 ✅ ❌ 👩‍🚀 🇨🇿 ❤️ 🙂🙂 🚢🌊
def total(values: list[int]) -> int:
    result = 0
    for value in values:
        if value % 2 == 0:
            result += value
    return result
{"name": "get_weather", "arguments": {"city": "Brno", "days": 3, "units": "metric"}}
<a href="page.html">link</a> SELECT name, price FROM items WHERE price > 10 ORDER BY name;
0 1 2 3 4 5 6 7 8 9 10 42 100 1234 2026 3.14159 99.5 % 12:30 2026-11-30 1 + 1 = 2, 7 * 6 = 42
"""

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Tools, one JSON object a line:\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- 'Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""

_SHARED: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    # Three windowed layers, then a full one: both cache kinds in one model.
    "gemma3_text": {"sliding_window": 64, "sliding_window_pattern": 4, "query_pre_attn_scalar": 32},
    # Three recurrent layers, then an attention layer. Key and value heads are equal in number because
    # repeated heads take another code path in some kernels.
    "qwen3_5": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    "gemma4_text": {
        "sliding_window": 64,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "rope_theta": None,
    },
}
ARCHITECTURES = tuple(_ARCHITECTURES)


def make_tiny(
    directory: Path,
    *,
    architecture: str = "qwen3",
    dtype: str = "float32",
    seed: int = 0,
    vocab_size: int = 2048,
    max_position_embeddings: int = 8192,
) -> Path:
    """Write a random model of about a million parameters into `directory` and return it.

    architecture: one of ARCHITECTURES. dtype: an mlx float type's name (float16 is very slow on a CPU).
    vocab_size: rows of the embeddings, at least 512; the tokenizer has at most as many tokens.
    Equal arguments give equal weights and an equal tokenizer. Raises ValueError for arguments that do not
    fit.
    """
    if architecture not in _ARCHITECTURES:
        raise ValueError(f"architecture must be one of {', '.join(ARCHITECTURES)}, not {architecture!r}")
    if vocab_size < 512:
        raise ValueError("vocab_size must be at least 512")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(vocab_size)
    eos, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = {
        "model_type": architecture,
        **_SHARED,
        **_ARCHITECTURES[architecture],
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": dtype,
    }
    _save_weights(directory, config, _quiet_ids(tokenizer, vocab_size), dtype, seed)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": eos, "pad_token_id": pad})
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    return directory


def _train_tokenizer(vocab_size: int, extra: tuple[str, ...] = ()) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    # Markers of thinking and tool calls are ordinary added tokens, as in Qwen: decoding keeps them.
    added = [AddedToken(token, normalized=False, special=token.startswith("<|")) for token in SPECIAL_TOKENS]
    added += [AddedToken(token, normalized=False, special=True) for token in extra]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    return tokenizer


def _quiet_ids(tokenizer: Any, vocab_size: int) -> list[int]:
    """Ids whose text is not printable on its own, and ids that no token has."""
    quiet = []
    for index in range(vocab_size):
        token = tokenizer.id_to_token(index)
        text = tokenizer.decode([index], skip_special_tokens=False) if token else "\ufffd"
        control = any(unicodedata.category(char) == "Cc" and char not in "\n\t" for char in text)
        if control or "\ufffd" in text or token in SPECIAL_TOKENS or not text:
            quiet.append(index)
    return quiet


def _save_weights(directory: Path, config: dict[str, Any], quiet: list[int], dtype: str, seed: int) -> None:
    import importlib

    import mlx.core as mx
    from mlx.utils import tree_flatten

    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    # A deep copy, because some of these classes edit the nested dictionaries they are given.
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    weights = {}
    shapes = sorted((name, value) for name, value in tree_flatten(model.parameters()))
    for index, (name, value) in enumerate(shapes):
        # A key of its own for each weight leaves the process's random state alone.
        key = mx.random.key(seed * 100_003 + index)
        weights[name] = _initial(mx, name, value, key).astype(getattr(mx, dtype))
        if name.endswith("lm_head.weight"):
            weights[name][mx.array(quiet)] = 0
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})


def _initial(mx: Any, name: str, value: Any, key: Any) -> Any:
    if name.endswith("A_log"):
        return mx.log(mx.random.uniform(low=1, high=16, shape=value.shape, key=key))
    if name.endswith("q_norm.weight"):
        return value * 3  # sharp attention where queries are normalised
    if value.ndim < 2:
        return value
    fan_in = value.size // value.shape[0]
    if name.endswith("embed_tokens.weight"):
        scale = 1.0
    elif name.endswith("lm_head.weight"):
        scale = 3 * fan_in**-0.5  # logits with a standard deviation of about 3
    elif name.endswith("q_proj.weight"):
        scale = 3 * fan_in**-0.5  # sharp attention where they are not
    else:
        scale = 1.5 * fan_in**-0.5
    return scale * mx.random.normal(value.shape, key=key)


def break_model(directory: Path, kind: str, destination: Path | None = None) -> Path:
    """Copy the model in `directory`, damage the copy, and return its path.

    kind: one of BREAKAGES. destination: default a sibling called `<name>-<kind>`; it must not exist.
    Note on "no_tokenizer": for qwen and gemma3 models transformers then makes up an empty tokenizer and
    mlx_lm.load succeeds, so a loader has to look for the files itself; for llama and gemma4 it fails.
    Raises ValueError for an unknown kind.
    """
    if kind not in BREAKAGES:
        raise ValueError(f"kind must be one of {', '.join(BREAKAGES)}, not {kind!r}")
    copy = destination or directory.with_name(f"{directory.name}-{kind}")
    shutil.copytree(directory, copy)
    weights, config = copy / "model.safetensors", copy / "config.json"
    if kind == "truncated":
        data = weights.read_bytes()
        weights.write_bytes(data[: len(data) // 2])
    elif kind == "zero_bytes":
        weights.write_bytes(b"")
    elif kind == "missing_shard":
        _drop_shard(copy)
    elif kind == "unknown_architecture":
        _write_json(config, {**json.loads(config.read_text()), "model_type": "no_such_architecture"})
    elif kind == "gguf_only":
        for path in copy.iterdir():
            path.unlink()
        # The magic, version 3, no tensors and no metadata: a valid but empty file.
        (copy / "model.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    elif kind == "no_tokenizer":
        (copy / "tokenizer.json").unlink()
        (copy / "tokenizer_config.json").unlink()
    elif kind == "bad_config_json":
        config.write_text(config.read_text()[:-20])
    else:
        _reshape_one(weights)
    return copy


def _drop_shard(copy: Path) -> None:
    import mlx.core as mx

    single = copy / "model.safetensors"
    tensors = mx.load(str(single))
    names = sorted(tensors)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    half = len(names) // 2
    mx.save_safetensors(str(copy / first), {name: tensors[name] for name in names[:half]}, {"format": "mlx"})
    total = sum(value.nbytes for value in tensors.values())
    single.unlink()
    weight_map = {name: first if index < half else second for index, name in enumerate(names)}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(copy / "model.safetensors.index.json", index)


def _reshape_one(weights: Path) -> None:
    import mlx.core as mx

    tensors = mx.load(str(weights))
    name = next(name for name in sorted(tensors) if name.endswith("mlp.up_proj.weight"))
    tensors[name] = mx.concatenate([tensors[name], tensors[name][:1]])  # one row too many
    changed = weights.with_name("changed.safetensors")  # the loaded arrays may still read the old file
    mx.save_safetensors(str(changed), tensors, metadata={"format": "mlx"})
    changed.replace(weights)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
