"""Settings of `kvatlas router`, the OpenAI-compatible proxy."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from kvatlas.addresses import is_loopback
from kvatlas.errors import SettingsError
from kvatlas.identity import DEFAULT_TENANT
from kvatlas.runtime.http_access import HttpAccess
from kvatlas.settings.engine import EngineAccessSettings
from kvatlas.settings.field_types import CommaList, Labels, Name, PathList, Port
from kvatlas.settings.http import HttpSettings, read_tokens
from kvatlas.settings.process import COMMON, HelpGroups, Settings
from kvatlas.store.access import RedisAccess
from kvatlas.validation import DEFAULT_DECODE_TOKENS, Count, OutputTokens, Positive

CONTROL_AFTER = 1_000
"""From a router's port to its operators'."""
MOST_TOKENIZER_DEADLINE_MS = 1_000.0
"""In a burst all prompts are late together; to wait longer than this costs a client more than a miss."""
SESSION_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
    "x-opencode-session",
)
"""vLLM's own, Claude Code's, Codex' (the second of older versions), OpenCode's."""


class RoutingSettings(EngineAccessSettings, Settings):
    """How a process that gets requests reads and routes them."""

    help_groups: ClassVar[HelpGroups] = {
        "Requests": "tokenizer tokenizer_deadline_ms tenant_id salt_is_tenant output_tokens ask_usage decision_header",
        "Choice of a worker": "cost_profile rates_file learn marks follow session_ms session_headers temperature select_labels "
        "allow_workers deny_workers engine_addresses",
        "Index": "decision_deadline_ms read_replicas replica replica_memory_mib",
        "SLO and queue": "slo slo_ttft_ms slo_tpot_ms shed queue_requests queue_tokens queue_wait_s tenant_header "
        "priority_header",
    }

    host: Name = Field(default="127.0.0.1", description="Address to listen on.")
    tokenizer: Name = Field(
        default="engine",
        description="Source of a request's token ids: `engine` asks an engine's /tokenize; `none` routes by load alone; "
        "anything else is a folder with the model's tokenizer.json and chat template.",
    )
    tokenizer_deadline_ms: float = Field(
        default=200.0, gt=0, description="Milliseconds to get a request's token ids; after that it is routed by load."
    )
    tenant_id: Name = Field(default=DEFAULT_TENANT, description="Tenant of the requests.")
    salt_is_tenant: bool = Field(default=False, description="Use a request's cache salt as its tenant.")
    output_tokens: OutputTokens = Field(
        default=DEFAULT_DECODE_TOKENS,
        description="Expected output in tokens of a request without max_tokens, until a model's answers have shown theirs.",
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
    read_replicas: bool = Field(
        default=False,
        description="Read overlaps from the replicas of a Redis or Valkey cluster, up to 3 seconds late; choices are booked at "
        "its primaries.",
    )
    replica: bool = Field(
        default=False,
        description="Keep a copy of the index in this process, fed by NATS: overlaps need no call to the store.",
    )
    replica_memory_mib: Positive = Field(
        default=1_024, description="MiB that the copy may take, as estimated; beyond that the store answers."
    )
    marks: bool = Field(
        default=True,
        description="Believe hybrid models' marks; if off, route as if they reused all that is resident, to compare.",
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
    slo_tpot_ms: float = Field(default=80.0, gt=0, description="SLO: milliseconds for each further token.")
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
        description="Request headers that name a session, separated by commas; the first that is there counts. Empty: none, "
        "for clients that are not trusted.",
    )
    temperature: float = Field(
        default=0.0,
        ge=0,
        description="0: always pick the cheapest worker; higher: pick costlier ones too, with higher probability.",
    )
    engine_addresses: CommaList = Field(
        default=(),
        description="Networks and names of engines, separated by commas (10.1.0.0/16, *.engines.svc:8000); default: what "
        "publishers' identities allow, and private addresses (loopback ones if this router is on loopback).",
    )
    queue_requests: Count = Field(
        default=0,
        description="Requests that may wait in the router while every engine of a model is full; 0: they go to full engines.",
    )
    queue_tokens: Positive = Field(default=1_000_000, description="Prompt tokens of the requests that may wait.")
    queue_wait_s: float = Field(default=30.0, gt=0, description="Seconds after which a waiting request gets a 429.")
    tenant_header: str = Field(
        default="",
        description="Request header that names the tenant, for a fair queue. Trusted: a gateway must set it.",
    )
    priority_header: str = Field(
        default="",
        description="Request header with the priority in the queue, a number: lower is earlier. Trusted likewise.",
    )
    decision_header: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Explain the choice in a header of each answer. auto: to keys that may see it; without --clients-file on "
        "loopback.",
    )
    ask_usage: bool = Field(
        default=True, description="Request usage for streams too, and strip it if the client did not ask for it."
    )

    @property
    def shows_decisions(self) -> bool:
        """Do answers to clients that prove nothing have the decision header?"""
        return self.decision_header == "always" or (self.decision_header == "auto" and is_loopback(self.host))

    @property
    def most_tokenizer_deadline_ms(self) -> float:
        """Upper bound of the tokenizer's deadline while it is slow but still answers."""
        return MOST_TOKENIZER_DEADLINE_MS

    @property
    def redis(self) -> RedisAccess:
        """How to connect to the store."""
        return replace(super().redis, read_replicas=self.read_replicas)


class ProxySettings(RoutingSettings, HttpSettings):
    """One proxy process."""

    help_groups: ClassVar[HelpGroups] = {
        COMMON: "redis_url host port tokenizer replica",
        "Engines": "max_attempts disaggregate credentials_to",
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
        description="Processes that share the port; each has a port for operators of its own, counted up.",
    )
    share_port: bool = Field(
        default=False, description="Let other processes listen on the same port too (SO_REUSEPORT)."
    )
    control_host: Name = Field(
        default="127.0.0.1",
        description="Address of the port for operators: /kvatlas/*, /status, /metrics, the status page.",
    )
    control_port: Port | None = Field(
        default=None,
        description="Port for operators; 0: any free port. Default: --port plus 1,000; but --port itself for a router on "
        "loopback without files of tokens.",
    )
    control_token_file: Path | None = Field(
        default=None,
        description="File with the bearer tokens of the port for operators, one a line. Default: --http-token-file.",
    )
    max_attempts: Positive = Field(default=4, description="Workers to try for one request before giving up.")
    disaggregate: bool = Field(
        default=True,
        description="Let a prefill worker (publish --role prefill) compute the prompt where that is cheaper than one worker "
        "for both.",
    )
    credentials_to: CommaList = Field(
        default=(),
        description="Networks and names of engines that get clients' Authorization, Cookie and API keys, separated by commas; "
        "* for all; default: none.",
    )
    record: bool = Field(
        default=False, description="Let `kvatlas record` follow requests: hashes, sizes and times at /kvatlas/requests."
    )
    clients_file: Path | None = Field(
        default=None,
        description="TOML file of the clients that may use this router: their keys, certificates or tokens prove tenants, "
        "and limits are counted by them. Default: every client may, and there is one tenant.",
    )
    allow_path: PathList = Field(
        default=(),
        description="Further paths of engines that clients may use, separated by commas; /x/* stands for all below /x/. "
        "Default: the inference calls of vLLM, SGLang and TensorRT-LLM.",
    )
    request_hints: bool = Field(
        default=False,
        description="Heed the headers X-KVAtlas-Strategy, -Priority, -Session, -Allow and -Deny of requests. Trusted likewise.",
    )
    drain_s: float = Field(
        default=5.0,
        ge=0,
        le=600,
        description="Seconds between being not ready and taking no more requests, when stopped.",
    )
    grace_s: float = Field(
        default=180.0, ge=0, le=86_400, description="Seconds that running answers get after that, when stopped."
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

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """See `HttpSettings.load`. The file of operators' tokens must be readable too."""
        settings = super().load(**flags)
        _ = settings.control_http  # raises
        if settings.clients_file is not None and settings.http_token_file is not None:
            raise SettingsError("--clients-file and --http-token-file are both given; expected one of them")
        return settings

    @property
    def control_is_apart(self) -> bool:
        """Do operators' calls have a port of their own? On loopback that would keep no one out."""
        given = (self.control_port, self.control_token_file, self.http_token_file, self.clients_file)
        return any(one is not None for one in given) or not is_loopback(self.host)

    @property
    def control_http(self) -> HttpAccess:
        """Who may use the port for operators."""
        file = self.control_token_file
        return self.http if file is None else replace(self.http, tokens=read_tokens(file, "--control-token-file"))

    @property
    def control_at(self) -> int:
        """The port for operators."""
        after = self.port + CONTROL_AFTER
        return self.control_port if self.control_port is not None else after if self.port and after < 65_536 else 0
