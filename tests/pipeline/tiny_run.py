"""A teacher with random weights and a little text: enough to run a whole recipe in seconds.

`python -m tests.pipeline.tiny_run FOLDER` writes the teacher that configs/tiny.yaml names.
"""

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from model.checkpoint import save_model
from model.config import ModelConfig
from model.transformer import Transformer

ROOT = Path(__file__).resolve().parent.parent.parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["still", "pot", "copper", "steam", "mash", "wort", "grain", "cask", "spirit", "cut", "heart", "tail", "boil"]


def write_text(folder: Path, *, documents: int = 24, words: int = 160, seed: int = 0) -> Path:
    """Text files of made-up sentences; the same seed gives the same text."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)
    for number in range(documents):
        text = " ".join(generator.choice(WORDS) for _ in range(words))
        (folder / f"{number:02d}.txt").write_text(f"{number}: {text}.\n", encoding="utf-8")
    return folder


def write_teacher(folder: Path, *, seed: int = 0, layers: int = 3) -> Path:
    """A model folder in Hugging Face's layout: 32 wide, 320 tokens, random weights that make clear choices."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    config = ModelConfig(
        family="llama",
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_layers=layers,
        num_query_heads=4,
        num_kv_heads=2,
        head_dim=8,
        windows=(None,) * layers,
        rope_layers=(True,) * layers,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
        initializer_range=0.3,
    )
    model = Transformer(config)
    model.initialize(seed)
    save_model(model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


if __name__ == "__main__":
    write_teacher(Path(sys.argv[1]))
