"""A tiny target and its drafter with random weights, in the files and under the names that released Qwen3 and DSpark checkpoints have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from experiments.drafter.pair import ReleasedConfig
from experiments.drafter.vocabulary import BytePairs

CONFIG = ReleasedConfig("theirs", "them/target", "them/drafter")
VOCAB, WIDTH, HEADS, KEY_VALUE_HEADS, HEAD_WIDTH, FEED_FORWARD = 320, 24, 6, 2, 8, 40
TARGET_LAYERS, DRAFT_LAYERS, RANK = 4, 2, 8


@dataclass
class Released:
    """What the files hold; change it and `write` again."""

    target: dict[str, Tensor]
    drafter: dict[str, Tensor]
    target_config: dict[str, Any]
    drafter_config: dict[str, Any]
    tokenizer: str
    shards: int = 2

    def write(self, cache: Path) -> None:
        """Into the folders of `CONFIG` under `cache`."""
        target, drafter = (cache / name for name in (CONFIG.target, CONFIG.drafter))
        for folder, config in ((target, self.target_config), (drafter, self.drafter_config)):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(config))
        (target / "tokenizer.json").write_text(self.tokenizer)
        save_file(self.drafter, drafter / "model.safetensors")
        names = sorted(self.target)
        files = {name: f"model-{place % self.shards + 1:05}-of-{self.shards:05}.safetensors" for place, name in enumerate(names)}
        for file in set(files.values()):
            save_file({name: self.target[name] for name in names if files[name] == file}, target / file)
        (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def random_pair(vocabulary: BytePairs, *, tied: bool = False, head: str = "vanilla") -> Released:
    """fp32 weights, so that comparisons are sharp."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, near: float = 0.0) -> Tensor:
        return near + torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def layers(count: int, prefix: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for layer in range(count):
            of = f"{prefix}layers.{layer}"
            for name, outputs in (("q", HEADS), ("k", KEY_VALUE_HEADS), ("v", KEY_VALUE_HEADS)):
                found[f"{of}.self_attn.{name}_proj.weight"] = draw(outputs * HEAD_WIDTH, WIDTH)
            found[f"{of}.self_attn.o_proj.weight"] = draw(WIDTH, HEADS * HEAD_WIDTH)
            for name in ("gate", "up"):
                found[f"{of}.mlp.{name}_proj.weight"] = draw(FEED_FORWARD, WIDTH)
            found[f"{of}.mlp.down_proj.weight"] = draw(WIDTH, FEED_FORWARD)
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                found[f"{of}.{name}.weight"] = draw(HEAD_WIDTH, near=1.0)
            for name in ("input_layernorm", "post_attention_layernorm"):
                found[f"{of}.{name}.weight"] = draw(WIDTH, near=1.0)
        return found

    embedding = draw(VOCAB, WIDTH) * WIDTH**0.5
    target = {"model.embed_tokens.weight": embedding, "model.norm.weight": draw(WIDTH, near=1.0)} | layers(TARGET_LAYERS, "model.")
    lm_head = embedding if tied else draw(VOCAB, WIDTH)
    if not tied:
        target["lm_head.weight"] = lm_head
    drafter = {
        "embed_tokens.weight": embedding.clone(),
        "lm_head.weight": lm_head.clone(),
        "fc.weight": draw(WIDTH, 3 * WIDTH),
        "hidden_norm.weight": draw(WIDTH, near=1.0),
        "norm.weight": draw(WIDTH, near=1.0),
        "markov_head.markov_w1.weight": draw(VOCAB, RANK),
        "markov_head.markov_w2.weight": draw(VOCAB, RANK),
        "confidence_head.proj.weight": draw(1, WIDTH + RANK),
        "confidence_head.proj.bias": draw(1),
    } | layers(DRAFT_LAYERS, "")
    if head == "gated":
        drafter |= {"markov_head.gate_proj.weight": draw(RANK, WIDTH + RANK), "markov_head.gate_proj.bias": draw(RANK)}
    sizes = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": HEAD_WIDTH,
        "intermediate_size": FEED_FORWARD,
        "bos_token_id": vocabulary.separator,
    }
    of_target = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": TARGET_LAYERS, "tie_word_embeddings": tied}
    of_drafter = {
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": DRAFT_LAYERS,
        "num_target_layers": TARGET_LAYERS,
        "tie_word_embeddings": False,
        "block_size": 4,
        "mask_token_id": vocabulary.mask,
        "target_layer_ids": [-1, 0, 2],
        "markov_rank": RANK,
        "markov_head_type": head,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "num_anchors": 512,
    }
    return Released(target, drafter, sizes | of_target, sizes | of_drafter, vocabulary.json)
