"""An answer's reasoning and content as one text, with END between them, and how models mark that boundary in their
output."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas_router.continuation.reasons import CannotContinue, Why
from kvatlas_router.continuation.rest_request import begun_stop

END = "\ud800"
"""No engine's text can contain this character: it is half of a surrogate pair."""
_FRAMED = ("ernie", "hunyuan")
"""Models that also mark their content; their parsers remove these marks too."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The markers that begin and end a model's reasoning, one token each. `ids`: their token ids, which depend on the model."""

    start: str
    end: str
    ids: Sequence[int] = ()

    def is_open(self, ids: Sequence[int]) -> bool:
        """True if the last marker among these tokens begins reasoning."""
        return next((id == self.ids[0] for id in reversed(ids) if id in self.ids), False)

    def raw(self, text: str, *, opened: bool) -> str:
        """What the model generated for a joined text. `opened`: its reasoning began in the prompt."""
        return ("" if opened else self.start) + text.replace(END, self.end)


MARKERS = tuple(
    Markers(*pair)
    for pair in (
        ("<think>", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<seed:think>", "</seed:think>"),
        ("<mm:think>", "</mm:think>"),
    )
)
"""The markers of those reasoning parsers in vLLM 0.33 and SGLang 0.5.23 that remove nothing else."""


def markers_of(model_id: str | None) -> Sequence[Markers]:
    """The markers that this model may have."""
    return () if model_id is None or any(name in model_id.lower() for name in _FRAMED) else MARKERS


@dataclass(slots=True)
class ThoughtEnds:
    """How a pool's parsers treat white space at the end of the reasoning, as its answers have shown. If `keep` is True, they
    send it immediately, as at the end of any part. If it is False, they remove it there; elsewhere they send white space at
    the end of a part together with the next part. None: not known yet. A part of the reasoning that ends in white space shows
    that they keep it. If complete reasoning has no such part, `keep` is False."""

    keep: bool | None = None


class Thoughts:
    """Joins the first engine's parts with those of later engines, which are not parsed. `reasoned`: the answer has
    reasoning; `thinks`: the client has received nothing after the reasoning yet. `ends`: see `ThoughtEnds`."""

    def __init__(self, ends: ThoughtEnds) -> None:
        self.reasoned = self.thinks = False
        self.ends = ends
        self.markers: Markers | None = None
        self.inside = False
        """The current engine's tokens are reasoning."""
        self._held = ""
        self._between = self._fresh = False

    def join(self, reasoning: str, content: str) -> str:
        """Add a part of the first engine's answer. Raises CannotContinue for reasoning after content."""
        if reasoning:
            if self.reasoned and not self.thinks:
                raise CannotContinue(Why.REASONING)
            self.reasoned = self.thinks = True
            if reasoning[-1].isspace():
                self.ends.keep = True
        if not (content and self.thinks):
            return reasoning + content
        self.thinks = False
        if self.ends.keep is None:
            self.ends.keep = False
        return reasoning + END + content

    def resume(self, markers: Markers | None, *, inside: bool, fresh: bool) -> None:
        """From now on, read parts as another engine's model generates them. `markers=None`: they contain no reasoning.
        `fresh`: the first part may begin the reasoning."""
        self.markers, self.inside, self._held = markers, inside, ""
        self._between, self._fresh = False, fresh and not inside

    def follow(self, reasoning: str, content: str) -> str:
        """A part of another engine that parses the reasoning itself. Raises CannotContinue for reasoning after its end."""
        if reasoning and not self.inside:
            raise CannotContinue(Why.DIVERGED)
        if not (content and self.inside):
            return reasoning + content
        self.inside = False
        return reasoning + END + content

    def read(self, text: str, *, last: bool) -> str:
        """A later engine's part as joined text. The result is empty as long as the part may belong to a marker or to
        something that parsers remove. Raises CannotContinue if the part may begin the reasoning (`resume`'s `fresh`)
        but has no start marker."""
        if self.markers is None:
            return text
        text, self._held, thought = self._held + text, "", ""
        if self._fresh and text:
            self._fresh = False
            self.inside = text.startswith(self.markers.start)
            if not self.inside:
                raise CannotContinue(Why.REASONING)  # the parser of such a model needs no start marker
            text = text.removeprefix(self.markers.start)
        if self.inside:
            thought, found, text = text.partition(self.markers.end)
            if not found and not last and self._may_go_on(thought):
                self._held = thought
                return ""
            if found:
                self.inside, self._between = False, True
            thought = thought if self.ends.keep else thought.rstrip()
        if text and self._between:
            self._between = False
            return thought + END + text
        return thought + text

    def _may_go_on(self, thought: str) -> bool:
        assert self.markers is not None
        return begun_stop(thought, (self.markers.end,)) > 0 or (not self.ends.keep and thought[-1:].isspace())

    def write(self, text: str) -> tuple[str, str]:
        """The reasoning and the content of a part that the client gets."""
        if not self.thinks:
            return "", text
        reasoning, ended, content = text.partition(END)
        self.thinks = not ended
        return reasoning, content
