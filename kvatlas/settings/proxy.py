"""Settings of `kvatlas router`, the OpenAI-compatible proxy."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from kvatlas.addresses import is_loopback
from kvatlas.http.access import HttpAccess
from kvatlas.settings.clients import ClientSettings
from kvatlas.settings.field_types import CommaList, Labels, Name, PathList, Port
from kvatlas.settings.lookup import LookupSettings
from kvatlas.settings.process import COMMON, HelpGroups
from kvatlas.validation import DEFAULT_DECODE_TOKENS, Count, OutputTokens, Positive

SESSION_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
    "x-opencode-session",
)
"""Those of vLLM, Claude Code, Codex (the second one is from older versions) and OpenCode."""


class RoutingSettings(LookupSettings):
    """How a process that gets requests reads and routes them."""

    help_groups: ClassVar[HelpGroups] = {
        "Requests": "tokenizer tokenizer_deadline_ms tenant_id salt_is_tenant output_tokens ask_usage decision_header",
        "Choice of a worker": "cost_profile rates_file learn marks follow session_ms session_headers temperature select_labels "
        "allow_workers deny_workers engine_addresses",
        "Index": "decision_deadline_ms read_replicas replica replica_memory_mib replica_file",
        "SLO and queue": "slo slo_ttft_ms slo_tpot_ms shed queue_requests queue_tokens queue_wait_s tenant_header "
        "priority_header",
    }

    host: Name = Field(default="127.0.0.1", description="Address to listen on.")
    output_tokens: OutputTokens = Field(
        default=DEFAULT_DECODE_TOKENS,
        description="Expected output tokens of a request without max_tokens, until the model's answers show their "
        "length.",
    )
    cost_profile: Literal["engine", "quillcache"] = Field(default="engine", description="Cost profile to price with.")
    rates_file: Path | None = Field(
        default=None,
        description="File with rates for cost profile engine, written by `kvatlas calibrate`; default: none.",
    )
    decision_deadline_ms: float = Field(
        default=10.0,
        gt=0,
        description="Milliseconds that a decision may wait for the store; after that it is made without it.",
    )
    marks: bool = Field(
        default=True,
        description="Use hybrid models' marks; if off, route as if they reused all resident blocks, for comparison.",
    )
    learn: bool = Field(
        default=True, description="Learn the workers' rates from finished requests (cost profile engine)."
    )
    follow: Literal["cost", "round_robin"] = Field(
        default="cost",
        description="Policy that decides; with any other than cost, the choice by cost is only recorded (shadow mode).",
    )
    slo: Literal["told", "penalty", "filter"] = Field(
        default="told",
        description="Treatment of a worker that would miss the SLO: reported in the answer, priced higher, or left out.",
    )
    slo_ttft_ms: float = Field(default=800.0, gt=0, description="SLO: milliseconds to the first token.")
    slo_tpot_ms: float = Field(default=80.0, gt=0, description="SLO: milliseconds for each later token.")
    shed: bool = Field(default=False, description="Answer 503 if every engine would miss the SLO by far.")
    select_labels: Labels = Field(
        default_factory=dict, description="Use only workers with these labels: name=value pairs, separated by commas."
    )
    allow_workers: CommaList = Field(
        default=(), description="Use only these workers, separated by commas; default: all."
    )
    deny_workers: CommaList = Field(default=(), description="Never use these workers, separated by commas.")
    session_ms: float = Field(
        default=0.0,
        ge=0,
        description="Cost in milliseconds of moving a session to another worker; 0: ignore sessions.",
    )
    session_headers: CommaList = Field(
        default=SESSION_HEADERS,
        description="Request headers that name a session, separated by commas; the first one present counts. Empty: none, "
        "for clients that are not trusted.",
    )
    temperature: float = Field(
        default=0.0,
        ge=0,
        description="0: always pick the cheapest worker; higher: pick costlier ones too, with higher probability.",
    )
    queue_requests: Count = Field(
        default=0,
        description="Requests that may wait in the router while every engine of a model is full; 0: no queue, "
        "requests go to full engines.",
    )
    queue_tokens: Positive = Field(default=1_000_000, description="Limit of prompt tokens over all waiting requests.")
    queue_wait_s: float = Field(default=30.0, gt=0, description="Seconds after which a waiting request gets a 429.")
    tenant_header: str = Field(
        default="",
        description="Request header that names the tenant, for a fair queue. Trusted: a gateway must set it.",
    )
    priority_header: str = Field(
        default="",
        description="Request header with the priority in the queue, a number; lower is earlier. Trusted: a gateway "
        "must set it.",
    )
    decision_header: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Explain the choice in a header of each answer. auto: for keys that may see it, or on loopback "
        "without --clients-file.",
    )
    ask_usage: bool = Field(
        default=True, description="Request usage for streams too, and strip it if the client did not ask for it."
    )

    @property
    def shows_decisions(self) -> bool:
        """True if answers to clients without credentials carry the decision header."""
        return self.decision_header == "always" or (self.decision_header == "auto" and is_loopback(self.host))


class ProxySettings(RoutingSettings, ClientSettings):
    """Settings of one proxy process."""

    help_groups: ClassVar[HelpGroups] = {
        COMMON: "redis_url host port tokenizer replica",
        "Engines": "max_attempts continue_answers engine_priority disaggregate credentials_to",
        "Clients": "clients_file allow_path request_hints cors_origins held_s held_requests access_log record",
        "Operators": "control_host control_port control_token_file",
        "HTTP server": "processes share_port drain_s grace_s",
    }

    host: Name = Field(default="127.0.0.1", description="Address to listen on.")
    port: Port = Field(default=8080, description="Port to listen on; 0: any free port.")
    processes: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Processes that share the port. Each has its own port for operators, counted up.",
    )
    share_port: bool = Field(
        default=False, description="Let other processes listen on the same port too (SO_REUSEPORT)."
    )
    max_attempts: Positive = Field(default=4, description="Workers to try for one request before giving up.")
    continue_answers: Literal["off", "deterministic", "all"] = Field(
        default="off",
        description="Streams that another worker continues if their engine dies mid-answer: none, those with temperature "
        "0 or a seed, or all.",
    )
    engine_priority: bool = Field(
        default=False,
        description="Send vLLM (--scheduling-policy priority) each request's priority: those with little to compute first, "
        "within a bound.",
    )
    disaggregate: bool = Field(
        default=True,
        description="Let a prefill worker (publish --role prefill) compute the prompt if that is cheaper than one "
        "worker for both.",
    )
    credentials_to: CommaList = Field(
        default=(),
        description="Networks and names of engines that get clients' Authorization, Cookie and API keys, separated by commas; "
        "* for all; default: none.",
    )
    record: bool = Field(
        default=False, description="Let `kvatlas record` follow requests: hashes, sizes and times at /kvatlas/requests."
    )
    allow_path: PathList = Field(
        default=(),
        description="Additional paths of engines that clients may use, separated by commas; /x/* means all below "
        "/x/. Default: only the inference calls of vLLM, SGLang and TensorRT-LLM.",
    )
    request_hints: bool = Field(
        default=False,
        description="Obey the headers X-KVAtlas-Strategy, -Priority, -Session, -Wait-Ms, -Allow and -Deny of requests. "
        "Trusted: a gateway must set or remove them.",
    )
    drain_s: float = Field(
        default=5.0,
        ge=0,
        le=600,
        description="Seconds for which a stopping server is not ready but still accepts requests.",
    )
    grace_s: float = Field(
        default=180.0, ge=0, le=86_400, description="Seconds for answers in progress after that, when stopped."
    )
    cors_origins: CommaList = Field(
        default=(), description="Origins of web pages that may use the proxy, separated by commas; *: all."
    )
    held_requests: Positive = Field(
        default=2_000, description="Requests that one client may hold by /kvatlas/route without /kvatlas/done."
    )
    access_log: bool = Field(default=True, description="Log a line for each request, with the decision.")
    held_s: float = Field(
        default=600.0, gt=0, description="Seconds after which a /kvatlas/route without its /kvatlas/done is released."
    )

    @property
    def http(self) -> HttpAccess:
        """See `ClientSettings.http`."""
        return replace(super().http, origins=self.cors_origins)

    @property
    def control_is_apart(self) -> bool:
        """See `ClientSettings.control_is_apart`. Web pages that may use the proxy must not be able to make operators' calls."""
        return bool(self.cors_origins) or super().control_is_apart
