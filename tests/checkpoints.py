"""Two small models that the tests make: TINY with real attention, CHAIN with an exactly known law. Nothing is downloaded.

TINY finds faults of cache, position and mask; CHAIN ignores its context, so it finds faults of law, stops and counts.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

BOS, EOS, PAD, START, END = 256, 257, 258, 259, 260
"""Special tokens of TINY; ids 0 to 255 are the bytes, ids from 261 to the end of the vocabulary are unused specials."""

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")

NEVER = -30.0
"""The logit of a token that CHAIN never emits."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def tiny(folder: Path, family: str = "llama", *, seed: int = 0, **config: Any) -> Path:
    """A random two-layer float32 checkpoint in Hugging Face layout, with a byte tokenizer and a chat template.

    ``config`` overrides keys of config.json. The same arguments give the same weights.
    """
    values = tiny_config(family, **config)
    write(folder, values, random_weights(values, seed))
    byte_tokenizer(folder, values["vocab_size"])
    return folder


def tiny_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """The config.json of TINY."""
    return {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
        **overrides,
    }


def random_weights(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Weights for a config, by their Hugging Face names.

    Scales are such that attention, feed-forward and embedding all matter, and that greedy text is varied but repeats itself
    now and then. Printable characters are likelier than other bytes, and special tokens are rare.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    family, d, ffn, v = config["model_type"], config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    hd, n_heads, n_kv = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    biases = {"q", "k", "v"} if family == "qwen2" else {"q", "k", "v", "o"} if config.get("attention_bias") else set()
    liked = torch.full((v, 1), 0.5)
    liked[32:127] = 1.0
    liked[256:] = 0.2
    tied = config["tie_word_embeddings"]
    head_scale = 2.5 / math.sqrt(d)
    weights = {"model.embed_tokens.weight": normal(v, d, scale=head_scale if tied else 1.0) * liked}
    if not tied:
        weights["lm_head.weight"] = normal(v, d, scale=head_scale) * liked
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, n, k in (("q", n_heads * hd, d), ("k", n_kv * hd, d), ("v", n_kv * hd, d), ("o", d, n_heads * hd)):
            weights[f"{layer}self_attn.{name}_proj.weight"] = normal(n, k, scale=1.6 / math.sqrt(k))
            if name in biases:
                weights[f"{layer}self_attn.{name}_proj.bias"] = normal(n, scale=0.3)
        for name, n, k in (("gate", ffn, d), ("up", ffn, d), ("down", d, ffn)):
            weights[f"{layer}mlp.{name}_proj.weight"] = normal(n, k, scale=1.6 / math.sqrt(k))
            if config.get("mlp_bias"):
                weights[f"{layer}mlp.{name}_proj.bias"] = normal(n, scale=0.3)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{name}.weight"] = 1 + normal(d, scale=0.1)
        if family == "qwen3":
            for name in ("q_norm", "k_norm"):
                weights[f"{layer}self_attn.{name}.weight"] = 1 + normal(hd, scale=0.1)
    weights["model.norm.weight"] = 1 + normal(d, scale=0.1)
    return weights


def chain(
    folder: Path,
    law: Many[Many[float]] | Tensor,
    pieces: Many[str],
    *,
    eos: int | None = None,
    context: int = 256,
) -> Path:
    """A Llama checkpoint whose next-token law depends on the last token alone and is known exactly.

    The residual stream holds a one-hot of the last token (attention and feed-forward add zero), and the head holds the
    logarithms of the law.

    Args:
        law: [H, H], ``law[i][j]`` the probability of token j after token i; rows sum to 1. A zero becomes the logit NEVER.
        pieces: the text of each token; ``<0xE2>`` is a byte. A prompt is cut into as few pieces as spell it.
        eos: the end token, if there is one; it is a special token, left out of decoded text.
    """
    table = torch.as_tensor(law, dtype=torch.float64)
    h = len(pieces)
    if table.shape != (h, h) or not torch.allclose(table.sum(1), torch.ones(h, dtype=torch.float64), atol=1e-9):
        raise ValueError(f"the law of {h} pieces must be [{h}, {h}] with rows that sum to 1, got {list(table.shape)}")
    width = -(-h // 32) * 32  # whole groups of 32, so that block precision can run it too
    config = tiny_config(
        vocab_size=h,
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=None,
    )
    weights = random_weights(config, seed=0)
    weights["model.embed_tokens.weight"] = math.sqrt(width) * torch.eye(h, width)
    weights["model.layers.0.self_attn.o_proj.weight"].zero_()
    weights["model.layers.0.mlp.down_proj.weight"].zero_()
    weights["model.norm.weight"] = torch.full((width,), 1 / math.sqrt(width))
    head = torch.zeros(h, width)
    head[:, :h] = torch.where(table > 0, table.log(), torch.tensor(NEVER, dtype=torch.float64)).T.float()
    weights["lm_head.weight"] = head
    write(folder, config, weights)
    piece_tokenizer(folder, pieces, eos)
    return folder


def path_law(path: Many[int], size: int) -> Tensor:
    """The law that follows a path of distinct tokens for certain; its last token, and any other one, lead to the first."""
    law = torch.zeros(size, size, dtype=torch.float64)
    law[:, path[0]] = 1.0
    for i, j in itertools.pairwise(path):
        law[i] = 0.0
        law[i, j] = 1.0
    return law


def write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], shards: int = 1) -> None:
    """Write config.json, generation_config.json and one or more safetensors shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": config.get("bos_token_id"), "eos_token_id": config.get("eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    names = list(weights)
    if shards == 1:
        save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = {name: f"model-{1 + i * shards // len(names):05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        part = {name: weights[name] for name in names if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(t.numel() * t.element_size() for t in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def byte_tokenizer(folder: Path, vocab_size: int) -> None:
    """One token per byte (the id is the byte), then the special tokens, then unused ones up to the size of the vocabulary."""
    vocab = {character: byte for byte, character in byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    unused = [f"<|unused_{i}|>" for i in range(256 + len(SPECIALS), vocab_size)]
    tokenizer.add_special_tokens([*SPECIALS, *unused])
    tokenizer.save(str(folder / "tokenizer.json"))
    _tokenizer_config(folder, bos="<|bos|>", eos="<|eos|>")


def piece_tokenizer(folder: Path, pieces: Many[str], eos: int | None) -> None:
    """Whole pieces, of which a text is cut into as few as spell it; other text gets an id past the model's vocabulary."""
    vocab = [*((piece, -1.0) for piece in pieces), ("<|unknown|>", -100.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=len(pieces), byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    if eos is not None:
        tokenizer.add_special_tokens([pieces[eos]])
    tokenizer.save(str(folder / "tokenizer.json"))
    _tokenizer_config(folder, bos=None, eos=None if eos is None else pieces[eos])


def byte_characters() -> dict[int, str]:
    """The printable character that byte-level vocabularies write for each byte: itself, or one from U+0100 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return {byte: chr(byte if byte in plain else next(others)) for byte in range(256)}


def _tokenizer_config(folder: Path, bos: str | None, eos: str | None) -> None:
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE if bos else "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=2))
