"""A stub's answer: a fixed text, or what the prompt's last `[[say TEXT]]` asks for; if the prompt ends with a part of that,
the rest. `[[slow N]]` waits N seconds before each token; `[[fail]]` makes the engine fail.

It runs in the engines' own environments and needs nothing of this project.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

ANSWER = "The worker that holds the most blocks of this prefix answers."
_SAY = re.compile(r"\[\[say (.*?)\]\]", re.S)
_SLOW = re.compile(r"\[\[slow ([0-9.]+)\]\]")
_FAIL = re.compile(r"\[\[fail\]\]")


@dataclass(frozen=True, slots=True)
class Script:
    """`token_ids`, without the end token; `slow_s`: seconds before each of them."""

    token_ids: tuple[int, ...]
    slow_s: float = 0.0
    fails: bool = False


class Scripts:
    """Reads prompts with the model's own tokenizer."""

    def __init__(self, model: str) -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
        self.end = int(self._tokenizer.token_to_id("<|im_end|>") or 0)

    def of(self, prompt: list[int]) -> Script:
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        said, slow = _SAY.findall(text), _SLOW.findall(text)
        answer = self._rest(said[-1] if said else ANSWER, prompt, text)
        return Script(tuple(answer), float(slow[-1]) if slow else 0.0, bool(_FAIL.search(text)))

    def _rest(self, answer: str, prompt: list[int], text: str) -> list[int]:
        """The rest of the answer's tokens. The prompt, which has this text, may end with a part of the answer: tokens, or text
        that may end within one."""
        ids = self._encode(answer)
        if begun := next((at for at in range(len(ids), 0, -1) if prompt[-at:] == ids[:at]), 0):
            return ids[begun:]
        sent = next((answer[:at] for at in range(len(answer), 0, -1) if text.endswith(answer[:at])), "")
        ends = (at for at in range(len(ids)) if self._tokenizer.decode(ids[:at], skip_special_tokens=False) == sent)
        at = next(ends, None)
        return ids[at:] if at is not None else self._encode(answer[len(sent) :])

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def id_of(self, text: str) -> int | None:
        ids = self._encode(text)
        return ids[0] if len(ids) == 1 else None
