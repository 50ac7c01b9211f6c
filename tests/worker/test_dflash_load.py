"""Loads with a draft: what does not fit is told with its numbers, and fails the load only if it is required."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.protocol import checks
from mlx_bulkhead.protocol.commands import Generate, Load
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.values import Draft
from mlx_bulkhead.worker.engines.base import LoadProblem
from mlx_bulkhead.worker.engines.dflash.gate import Unfit, check_quant, check_target

from tests.support.speculation import Hand, draft_directory, open_pair
from tests.support.tiny_drafts import make_draft

from .test_engine import PROMPTS, library, model_directory, open_tiny


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe", "Qwen3_5", "gemma4", "gemma4_text"])
def test_known_targets(kind: str) -> None:
    check_target({"model_type": kind})


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "gemma3_text", "gemma4_assistant", "gpt_oss", ""])
def test_unknown_targets_are_named(kind: str) -> None:
    """The nested type does not count: a drafter of another kind has one that would pass."""
    with pytest.raises(Unfit, match=f"model_type is {kind!r}"):
        check_target({"model_type": kind, "text_config": {"model_type": "gemma4_text"}})


@pytest.mark.parametrize("spec", ["", "none", "w4", "w8a16", "W4A32:GS128", "w2:gs32", "w4a16:gs64"])
def test_quant_specs(spec: str) -> None:
    check_quant(spec)


@pytest.mark.parametrize("spec", ["w3", "4", "w4a8", "w4:gs16", "w4a16gs64", "junk", " w4", "w4\n"])
def test_junk_quant_specs_are_refused(spec: str) -> None:
    with pytest.raises(Unfit, match="w4a16:gs64"):
        check_quant(spec)


def _rewrite(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def _own_head(path: Path) -> None:
    import mlx.core as mx

    weights = mx.load(str(path / "model.safetensors"))
    mx.save_safetensors(str(path / "new.safetensors"), {**weights, "lm_head.weight": mx.zeros((8, 8))})
    (path / "new.safetensors").replace(path / "model.safetensors")


def _truncate(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def _index(path: Path) -> None:
    index = {"weight_map": {"norm.weight": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "hidden size": (_rewrite(hidden_size=64), "hidden size of 64, and this target has 128"),
    "vocabulary": (_rewrite(vocab_size=4096), "vocabulary of 4096, and this target has 2048"),
    "layers": (_rewrite(num_target_layers=36), "36 layers, and this target has 4"),
    "layer ids": (_rewrite(dflash_config={"target_layer_ids": [1, 9]}), "reads layer 9 of its target"),
    "block": (_rewrite(block_size=1), "block_size 1; 2 to 256"),
    "mask": (_rewrite(dflash_config={"mask_token_id": 5000}), "mask_token_id 5000"),
    "own head": (_own_head, "output head of its own"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "no model*.safetensors in"),
    "no config": (lambda path: (path / "config.json").unlink(), "config.json"),
    "cut short": (_truncate, "is incomplete"),
    "shard": (_index, "model-00002-of-00002.safetensors is missing"),
    "shapes": (_rewrite(intermediate_size=96), "cannot be loaded"),
    "nothing there": (shutil.rmtree, "there is nothing at|cannot be loaded"),
}


@pytest.mark.parametrize("kind", list(DAMAGE))
def test_an_unfit_draft_is_told_and_the_model_serves_without(tmp_path: Path, kind: str) -> None:
    """The reason is in `Loaded`, in the stats and with each answer; nothing of the model is changed."""
    damage, words = DAMAGE[kind]
    draft = tmp_path / "draft"
    shutil.copytree(draft_directory("qwen3"), draft)
    damage(draft)
    engine = open_tiny("qwen3", draft=Draft(str(draft)))
    try:
        info = engine.info.speculation
        assert info is not None
        assert not info.active
        assert any(part in info.reason for part in words.split("|")), info.reason
        hand = Hand(engine)
        for number in range(3):  # a batch, which the library's hooks would break
            hand.insert(str(number), PROMPTS[number], max_tokens=8)
        hand.finish_all()
        hand.check("qwen3")
        served = engine.served(b"0")
        assert served.engine == "batch"
        assert served.fallback_reason == info.reason
        stats = engine.speculation_stats()
        assert stats is not None
        assert stats.reason == info.reason
    finally:
        engine.close()


def test_a_required_draft_that_does_not_fit_fails_the_load(tmp_path: Path) -> None:
    with pytest.raises(LoadProblem, match=r"the draft is required: .*nowhere") as caught:
        open_tiny("qwen3", draft=Draft(str(tmp_path / "nowhere"), required=True))
    assert caught.value.code == ErrorCode.LOAD_FAILED


@pytest.mark.parametrize(
    ("load", "draft", "words"),
    [
        ({"kv_bits": 8, "kv_group_size": 32}, {}, "kv_bits and a draft cannot be used together"),
        ({"max_kv_size": 256}, {}, "max_kv_size and a draft cannot be used together"),
        ({}, {"quant": "w5"}, "draft.quant 'w5'"),
        ({}, {"model": "auto"}, "dflash-mlx knows no draft for"),
    ],
)
def test_options_that_do_not_go_together_are_told(load: dict[str, Any], draft: dict[str, Any], words: str) -> None:
    engine = open_tiny("qwen3", draft=Draft(**{"model": str(draft_directory("qwen3")), **draft}), **load)
    assert engine.info.speculation is not None
    assert words in engine.info.speculation.reason
    engine.close()


def test_another_architecture_is_told(tmp_path: Path) -> None:
    engine = open_tiny("llama", draft=Draft(str(draft_directory("qwen3"))))
    assert engine.info.speculation is not None
    assert "model_type is 'llama'" in engine.info.speculation.reason
    engine.close()


def test_a_library_that_does_not_fit_is_found_out_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook whose signature does not match the model's code: the trial fails, and the classes are as before."""
    from dflash_mlx.engine import target_qwen_gdn as library_code
    from mlx_lm.models import qwen3

    before = qwen3.Attention.__call__

    def install(attention: Any) -> None:
        def call(self: Any, x: Any, somewhere: Any) -> Any:
            raise AssertionError("not to be reached")

        type(attention).__call__ = call

    monkeypatch.setattr(library_code, "_install_full_attention_gqa_hook", install)
    engine = open_tiny("qwen3", draft=Draft(str(draft_directory("qwen3"))))
    assert engine.info.speculation is not None
    assert engine.info.speculation.reason.startswith("DFlash fails with this pair: ")
    assert qwen3.Attention.__call__ is before
    engine.close()


def test_a_target_that_the_library_computes_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_mlx.engine.target_qwen_gdn import QwenGdnTargetOps

    own = QwenGdnTargetOps.logits_from_hidden
    monkeypatch.setattr(QwenGdnTargetOps, "logits_from_hidden", lambda self, *given: -own(self, *given))
    engine = open_tiny("qwen3", draft=Draft(str(draft_directory("qwen3"))))
    assert engine.info.speculation is not None
    assert "dflash-mlx computes this model otherwise" in engine.info.speculation.reason
    engine.close()


@pytest.mark.parametrize("quant", ["w4:gs32", "w8a32:gs32"])
def test_a_quantised_draft_changes_no_text(quant: str) -> None:
    hand = Hand(engine := open_pair("qwen3", quant=quant, verify_mode="dflash"))
    hand.insert("a", PROMPTS[0])
    hand.finish_all()
    hand.check("qwen3")
    assert engine.info.speculation is not None
    assert engine.info.speculation.quant == quant
    engine.close()


@pytest.mark.parametrize(("wanted", "dtype"), [("auto", "float32"), ("own", "bfloat16"), ("float16", "float16")])
def test_the_draft_computes_in_the_type_that_is_asked_for(tmp_path: Path, wanted: Any, dtype: str) -> None:
    import mlx.core as mx

    make_draft(tmp_path, model_directory("qwen3"))
    weights = mx.load(str(tmp_path / "model.safetensors"))
    half = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    mx.save_safetensors(str(tmp_path / "half.safetensors"), half, {"format": "mlx"})
    (tmp_path / "half.safetensors").replace(tmp_path / "model.safetensors")
    engine = open_pair("qwen3", model=str(tmp_path), dtype=wanted)
    assert engine.info.speculation is not None
    assert engine.info.speculation.dtype == dtype
    engine.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_ctx": 0}, "draft.max_ctx must be 1 to"),
        ({"max_ctx": -4096}, "got -4096"),
        ({"window": 0}, "draft.window must be 1 to"),
        ({"sink": -1}, "draft.sink must be 0 to"),
        ({"disk_bytes": 2**30, "cache_entries": 0}, "draft.disk_bytes needs a cache in memory"),
        ({"disk_bytes": 2**30, "cache_bytes": 0}, "draft.disk_bytes needs a cache in memory"),
        ({"model": " "}, "draft.model must be"),
    ],
)
def test_ranges_are_checked_before_anything_is_loaded(options: dict[str, Any], words: str) -> None:
    problem = checks.check_load(Load("m", "/m", draft=Draft(**{"model": "/d", **options})))
    assert problem is not None
    assert words in problem.message


def test_a_pair_leaves_its_target_as_it_was() -> None:
    """A second model of the same class in the process, and mlx-lm's own batches, work beside it."""
    from mlx_lm.generate import BatchGenerator

    engine = open_pair("qwen3", verify_mode="dflash")
    hand = Hand(engine)
    hand.insert("a", PROMPTS[0])
    hand.until("a", 4)
    model, tokenizer = library("qwen3")
    generator: Any = BatchGenerator(model)
    uids = generator.insert([tokenizer.encode(PROMPTS[0]), tokenizer.encode(PROMPTS[1])], max_tokens=[6, 6])
    rows: dict[int, list[int]] = {uid: [] for uid in uids}
    while any(len(row) < 6 for row in rows.values()):
        for out in generator.next_generated():
            rows[out.uid].append(out.token)
    generator.close()
    hand.finish_all()
    hand.check("qwen3")
    row = engine.prepare(b"p", Generate(model="tiny", prompt=PROMPTS[0])).row
    assert rows[uids[0]] == hand.tokens["a"][:6]
    assert row.prompt == hand.ids["a"]
    engine.close()
