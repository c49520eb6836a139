"""Decides which answers can be continued after their engine has died, and why others can't."""

from enum import StrEnum

from kvatlas.errors import KvatlasError
from kvatlas_router.tokens.text_request import Api, TextRequest

MOST_CHOICES = 8
"""Each choice of an answer may need another request."""


class ContinueMode(StrEnum):
    """The requests whose streams are continued. `DETERMINISTIC`: only requests with temperature 0 or a seed."""

    OFF = "off"
    DETERMINISTIC = "deterministic"
    ALL = "all"


class Why(StrEnum):
    """Why an answer was not continued."""

    SAMPLED = "sampled"  # neither temperature 0 nor a seed
    CHOICES = "choices"  # several prompts, or too many choices
    BEAMS = "beams"
    ECHO = "echo"
    GUIDED = "guided"  # the grammar's state is lost
    AUDIO = "audio"
    PENALTIES = "penalties"  # engines count only what they generated themselves
    TEMPLATE = "template"  # the client's own template or form
    TOKENS = "tokens"  # the token ids were not known in time
    OBJECT = "object"  # only the engine has what the request names
    REASONING = "reasoning"  # only token ids can continue it and what follows, and they or its markers are unknown
    TOOL_CALL = "tool_call"  # no other engine can parse the rest of a call
    LONG = "long"  # longer than the part that is kept
    UNREADABLE = "unreadable"  # an event in another form
    DIVERGED = "diverged"  # the other engine repeated the last tokens differently
    SAME_TOKEN = "same_token"  # noqa: S105 - a second engine died at the same token
    REFUSED = "refused"  # no engine took the request for the rest
    NO_WORKER = "no_worker"  # no worker or no attempt left


class CannotContinue(KvatlasError):
    """The answer can't be continued on another worker."""

    def __init__(self, why: Why | None) -> None:
        """`why` None: continuing is switched off."""
        super().__init__(
            f"it can't continue at another worker (reason: {why.value if why is not None else 'switched off'})"
        )
        self.why = why


_GUIDES = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
)
"""Fields of vLLM and SGLang that constrain an answer; `response_format` and `tool_choice` may do so, too."""
_OWN_FORMS = (
    "chat_template",
    "truncate_prompt_tokens",
    "suffix",
    "prompt_logprobs",
    "custom_logit_processor",
    "stop_regex",
    "input_embeds",
    "session_params",
    "return_hidden_states",
)
_FREE = ("auto", "none")


def why_not(text: TextRequest, mode: ContinueMode) -> Why | None:
    """Why this request's stream can't be continued elsewhere, as far as its body shows; None if it can."""
    body = {**text.body, **text.sampling}
    deterministic = is_deterministic(text)
    if mode is ContinueMode.DETERMINISTIC and not deterministic:
        return Why.SAMPLED
    if text.prompts > 1 or text.choices > (MOST_CHOICES if text.api in (Api.CHAT, Api.COMPLETIONS) else 1):
        return Why.CHOICES
    if body.get("use_beam_search") or any(_is_more(body.get(name)) for name in ("best_of", "beam_width")):
        return Why.BEAMS
    if body.get("echo"):
        return Why.ECHO
    if body.get("include_reasoning") is False:
        return Why.REASONING
    if _is_guided(text):
        return Why.GUIDED
    modalities = body.get("modalities")
    if body.get("audio") or (isinstance(modalities, list) and "audio" in modalities):
        return Why.AUDIO
    if deterministic and (body.get("presence_penalty") or body.get("frequency_penalty")):
        return Why.PENALTIES
    if _has_own_form(text):
        return Why.TEMPLATE
    return None


def is_deterministic(text: TextRequest) -> bool:
    """True if the request asks for an answer that is always the same: greedy, or with a seed."""
    sampling = text.sampling
    temperature, seed = sampling.get("temperature"), sampling.get("seed", sampling.get("sampling_seed"))
    greedy = isinstance(temperature, (int, float)) and not isinstance(temperature, bool) and temperature == 0
    return greedy or type(seed) is int


def _is_guided(text: TextRequest) -> bool:
    body = {**text.body, **text.sampling}
    if any(body.get(name) is not None for name in _GUIDES):
        return True
    form = body.get("response_format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        return True
    config, choice = body.get("output_config", body.get("text")), body.get("tool_choice")
    form = config.get("format") if isinstance(config, dict) else None
    if form is not None and form != {"type": "text"}:
        return True
    choice = choice.get("type") if isinstance(choice, dict) and text.api is Api.MESSAGES else choice
    return bool(body.get("tools")) and choice not in (None, *_FREE)


def _has_own_form(text: TextRequest) -> bool:
    body = {**text.body, **text.sampling}
    if any(body.get(name) is not None for name in _OWN_FORMS):
        return True
    if text.api is Api.RESPONSES:
        include = body.get("include")
        shows_tokens = isinstance(include, list) and "message.output_text.logprobs" in include
        return shows_tokens or bool(body.get("background")) or body.get("truncation") == "auto"
    if text.api is not Api.CHAT:
        return False
    goes_on = body.get("continue_final_message") is True
    if goes_on:
        last = text.messages[-1]
        return last.get("role") != "assistant" or not isinstance(last.get("content"), str)
    return body.get("add_generation_prompt") is False


def _is_more(value: object) -> bool:
    return isinstance(value, int) and value > 1
