"""Small tokenizers, built here: nothing is downloaded."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvatlas_simulator.http.chat_template import CHAT_TEMPLATE

CORPUS = [
    "The cache holds blocks of tokens; a router asks which worker holds the most of them.",
    "Who holds this prefix? A worker that computed it before, in its memory or on its disk.",
    "def overlap(prompt): return max(worker.blocks for worker in pool)",
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def trained() -> Tokenizer:
    """A byte-level BPE tokenizer with special tokens, like that of many models."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True, normalized=False) for name in ("<s>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def bytewise() -> Tokenizer:
    """A tokenizer with one token per byte, whose id is the byte's value, like the simulated engine's."""
    letters = _byte_letters()
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


def _byte_letters() -> list[str]:
    """The character that stands for each byte in byte-level tokenizers (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in shown}
    for place, byte in enumerate(byte for byte in range(256) if byte not in letters):
        letters[byte] = chr(256 + place)
    return [letters[byte] for byte in range(256)]


def save_simulators(folder: Path) -> Path:
    """A model's folder with the simulated engine's tokenizer and chat template."""
    bytewise().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder
