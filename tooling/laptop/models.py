"""Random Llamas with a tokenizer and chat template of their own, made where they are needed: nothing is downloaded.

They say nothing sensible, but they are real models: what an engine caches for them, computes and measures is real. Run
with the engine's own Python, which has PyTorch: `python -m tooling.laptop.models SIZE DIRECTORY`.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any, Final

SEED: Final = 20_260_101
VOCABULARY: Final = 4096
CONTEXT: Final = 16_384
"""Tokens a model takes at most."""
SPECIAL: Final = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
"""The end of a message (and of an answer), then the beginning of one, by who speaks."""
TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Size:
    """Of a Llama. A head has at least 32 values: vLLM's attention on CPUs knows no smaller ones."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int


SIZES: Final[Mapping[str, Size]] = {
    "tiny": Size(layers=2, hidden=128, heads=4, kv_heads=2, inner=256),
    "small": Size(layers=12, hidden=768, heads=12, kv_heads=4, inner=2048),
}
"""`tiny` for logic: an answer in milliseconds. `small` for time: 82 million parameters, 12 KiB of KV per token, so
that a prompt of 4,000 tokens takes a core of a CPU seconds."""


def cached_model(size: str) -> Path:
    """Where the model of that size is kept between runs: a directory in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "warmpath" / "models" / f"{size}-{SEED}"


def make(size: str, directory: Path) -> None:
    """Write the model into `directory`, whole or not at all; nothing if it is there. The same bytes for each seed."""
    if (directory / "config.json").is_file():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    _write_tokenizer(fresh)
    _write_weights(SIZES[size], fresh)
    fresh.chmod(0o755)
    try:
        fresh.rename(directory)
    except OSError:
        if not (directory / "config.json").is_file():  # else: another process was faster
            raise


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", config)


def _sentences() -> Iterator[str]:
    """Text to learn words from: invented ones, some frequent and many rare, as in a language."""
    chance = Random(SEED)
    syllables = [first + vowel + last for first in "bdfgklmnprstvz" for vowel in "aeiou" for last in ("", *"lmnrst")]
    words = ["".join(chance.choices(syllables, k=chance.choice((1, 1, 2, 2, 3)))) for _ in range(6000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    for _ in range(6000):
        sentence = " ".join(chance.choices(words, weights, k=chance.randint(4, 14)))
        yield f"{sentence.capitalize()}{chance.choice('....?!,:')}"


def _write_weights(size: Size, directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    _write_json(directory / "generation_config.json", {"eos_token_id": 0})


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
