"""The tenth turn of a chat of 64k tokens beside its first reading, in the same run. Half a minute, most of it training.

The tokenizer is trained on this repository's text. Times are medians in milliseconds, in the thread that reads; ratios
are what to trust. `the same again` is what parsing, rendering, cutting and looking up cost.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from epp.plugin import Request
from epp.prefix.tokens.cache import TokenCache
from epp.prefix.tokens.prompt import prompt_of
from epp.prefix.tokens.tokenizer import ModelTokenizer

ROOT = Path(__file__).parents[2]
SPECIALS = ["<|begin|>", "<|role|>", "<|text|>", "<|end|>", *(f"<|reserved_{i}|>" for i in range(250))]
TEMPLATE = """{{ '<|begin|>' }}{% for message in messages %}
{{- '<|role|>' + message.role + '<|text|>\\n' + message.content | trim + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|role|>assistant<|text|>\\n' }}{% endif %}"""
TOKENS = 65536
TURNS = 10


def trained(texts: list[str]) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=16000, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    directory = Path(tempfile.mkdtemp())
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


def chat(text: str, turns: int, document: float) -> Request:
    """The first `turns` of ten: `document`, a share of the text, stands before ten equal turns of the rest."""
    start = round(len(text) * document)
    size, messages = (len(text) - start) // TURNS, [{"role": "system", "content": text[:start]}]
    for turn in range(turns):
        part = text[start + turn * size : start + (turn + 1) * size]
        messages.append({"role": "user", "content": part[: size // 2]})
        messages.append({"role": "assistant", "content": part[size // 2 :]})
    return Request(id="1", model="m", body=json.dumps({"messages": messages[:-1]}).encode())


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def shape(directory: Path, text: str, document: float) -> None:
    """One table: a chat whose tenth turn comes, read for the first time, after its ninth, and again."""
    times: dict[str, list[float]] = {"first reading": [], "tenth turn": [], "the same again": []}
    ninth, whole = prompt_of(chat(text, TURNS - 1, document)), chat(text, TURNS, document)
    for _ in range(5):
        pieces = TokenCache(1 << 28)
        tokenizer, fresh = (ModelTokenizer.load(directory, each) for each in (pieces, TokenCache(1 << 28)))
        tokenizer.ids(ninth, 60.0)
        before = pieces.encoded
        for name, reader in (("tenth turn", tokenizer), ("first reading", fresh), ("the same again", tokenizer)):
            times[name].append(timed(partial(read, reader, whole)))
        encoded = pieces.encoded - before
    print(f"a chat of {len(read(fresh, whole))} tokens: {document:.0%} a document, the rest {TURNS} equal turns")
    print(f"  {'':16} {'ms':>8} {'of the first reading':>21}")
    for name, found in times.items():
        median = statistics.median(found)
        print(f"  {name:16} {median:8.2f} {median / statistics.median(times['first reading']):20.1%}")
    print(f"  the tenth turn tokenized {encoded / len(text):.1%} of the text")


def read(tokenizer: ModelTokenizer, request: Request) -> Sequence[int]:
    return tokenizer.ids(prompt_of(request), 60.0)


def main() -> None:
    texts = [path.read_text("utf-8") for kind in ("epp/**/*.py", "tests/**/*.py", "*.md") for path in ROOT.glob(kind)]
    directory = trained(texts)
    everything = "\n".join(texts)[:1_000_000]
    tokens = len(read(ModelTokenizer.load(directory, TokenCache(1 << 28)), chat(everything, TURNS, 0.0)))
    text = everything[: TOKENS * len(everything) // tokens]
    for document in (0.9, 0.0):
        shape(directory, text, document)


if __name__ == "__main__":
    main()
