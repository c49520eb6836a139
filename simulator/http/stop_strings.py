"""Stop strings in an answer, as vLLM finds them: text that may begin a stop string is held back until the text after it
shows whether it does."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class StopStrings:
    """Reads the text of one answer. `matched`: the stop string that ended it."""

    stops: Sequence[str]
    matched: str | None = None
    _held: str = field(default="", init=False)

    def feed(self, text: str, *, last: bool) -> str:
        """Read more text, and return what may be sent now. `last`: no more text follows."""
        text, self._held = self._held + text, ""
        found = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.matched = min(found)
            return text[:at]
        waits = 0 if last else max(map(len, self.stops), default=1) - 1
        if not waits:
            return text
        self._held = text[-waits:]
        return text[:-waits]
