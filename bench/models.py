"""Models of real shapes with random weights, made on the device in seconds: speed does not ask what weights say."""

from typing import Any

import torch

from model.config import ModelConfig
from model.transformer import Transformer
from tests.tiny import tiny_config

LLAMA_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_layers": 32, "num_query_heads": 32,
    "num_kv_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072, "initializer_range": 0.02,
}  # fmt: skip
"""Llama-3.1-8B."""
LLAMA_1B = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_layers": 16, "num_query_heads": 32,
    "num_kv_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
    "initializer_range": 0.02,
}  # fmt: skip
"""Llama-3.2-1B."""
TINY = {"num_layers": 4, "initializer_range": 0.05}


def shaped(shape: dict[str, Any]) -> ModelConfig:
    """A Llama of one of the shapes above, which never ends a text by itself."""
    return tiny_config(**shape, eos_token_ids=())


@torch.no_grad()
def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Transformer:
    """Made where it stays: other numbers than `Transformer.initialize` draws, which does so on the host."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    model.to_empty(device=device)
    for parameter in model.parameters():
        parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(0.0, config.initializer_range)
    return model.eval()
