"""A GGUF model as a Hugging Face folder, for engines that read no GGUF: python bench/peers/export.py [--model ...] FOLDER

Blocks are dequantised and written as bf16 safetensors, rows in Hugging Face's order; the tokenizer and the chat template
come from the file's metadata.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor

from specdec.config import DEFAULT_MODEL
from specdec.models import gguf
from specdec.models.architecture import Architecture
from specdec.models.errors import ModelError
from specdec.models.gguf_model import GgufWeights
from specdec.models.source import resolve
from specdec.models.tokenizer import Tokenizer
from specdec.models.tokenizer_gguf import backend_from_gguf
from specdec.models.weights import Blocks

MARK = "exported.json"
"""Written last; names the file that the folder was made from."""


def export(source: Path, folder: Path) -> Path:
    """Write the folder, unless it is there already and was made from the same file.

    Returns:
        The folder.

    Raises:
        ModelError: the model is of a kind that this writes no config for.
    """
    made_from = {"file": source.name, "bytes": source.stat().st_size}
    mark = folder / MARK
    if mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == made_from:
        return folder
    file = gguf.read(source)
    weights = GgufWeights(file)
    config = _config(weights.architecture, source)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(dict(_tensors(weights)), folder / "model.safetensors", metadata={"format": "pt"})
    weights.check_all_used()
    tokenizer = Tokenizer.from_gguf(file.metadata)
    backend_from_gguf(file.metadata).save(str(folder / "tokenizer.json"))
    ends = sorted(weights.architecture.end_tokens)
    settings = {
        **tokenizer.special_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": weights.architecture.context,
        "chat_template": file.metadata["tokenizer.chat_template"],
    }
    _write(folder / "config.json", {**config, "bos_token_id": tokenizer.bos_id, "eos_token_id": ends})
    _write(folder / "generation_config.json", {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends})
    _write(folder / "tokenizer_config.json", settings)
    _write(mark, made_from)
    return folder


def _config(a: Architecture, source: Path) -> dict[str, object]:
    if a.family != "llama" or a.rope.kind != "default" or any(a.windows):
        raise ModelError(f"{source}: only llama models with plain rotary positions can be exported, this is {a.family}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.ffn_size,
        "num_hidden_layers": a.n_layers,
        "num_attention_heads": a.n_heads,
        "num_key_value_heads": a.n_kv_heads,
        "head_dim": a.head_dim,
        "max_position_embeddings": a.context,
        "rms_norm_eps": a.rms_eps,
        "rope_theta": a.rope.theta,
        "hidden_act": "silu",
        "attention_bias": a.qkv_bias,
        "mlp_bias": a.mlp_bias,
        "tie_word_embeddings": a.tied,
        "torch_dtype": "bfloat16",
    }


def _tensors(weights: GgufWeights) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a llama model under Hugging Face's name, in bf16."""
    a = weights.architecture
    matrices = {"model.embed_tokens": (a.vocab_size, a.hidden_size)}
    if not a.tied:
        matrices["lm_head"] = (a.vocab_size, a.hidden_size)
    vectors = {"model.norm": a.hidden_size}
    for i in range(a.n_layers):
        at = f"model.layers.{i}"
        vectors |= {f"{at}.input_layernorm": a.hidden_size, f"{at}.post_attention_layernorm": a.hidden_size}
        matrices |= {
            f"{at}.self_attn.q_proj": (a.q_size, a.hidden_size),
            f"{at}.self_attn.k_proj": (a.kv_size, a.hidden_size),
            f"{at}.self_attn.v_proj": (a.kv_size, a.hidden_size),
            f"{at}.self_attn.o_proj": (a.hidden_size, a.q_size),
            f"{at}.mlp.gate_proj": (a.ffn_size, a.hidden_size),
            f"{at}.mlp.up_proj": (a.ffn_size, a.hidden_size),
            f"{at}.mlp.down_proj": (a.hidden_size, a.ffn_size),
        }
    for name, size in vectors.items():
        yield f"{name}.weight", weights.vector(f"{name}.weight", size).bfloat16()
    for name, shape in matrices.items():
        matrix = weights.matrix(f"{name}.weight", *shape)
        if isinstance(matrix, Blocks):
            matrix = torch.from_numpy(dequantize(matrix.raw.numpy(), GGMLQuantizationType[matrix.kind]))
        yield f"{name}.weight", matrix.bfloat16().contiguous()


def _write(path: Path, record: dict[str, object]) -> None:
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="an alias or a .gguf file")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(export(resolve(arguments.model, progress=True).path, arguments.folder))


if __name__ == "__main__":
    main()
