"""Settings of `kvatlas epp`, the endpoint picker of gateways."""

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from kvatlas.errors import SettingsError
from kvatlas.settings.field_types import CommaList, Name, Port
from kvatlas.settings.process import COMMON, HelpGroups, missing_line
from kvatlas.settings.proxy import RoutingSettings
from kvatlas.validation import Count


class GatewaySettings(RoutingSettings):
    """The endpoint picker of a gateway."""

    help_groups: ClassVar[HelpGroups] = {
        COMMON: "redis_url port tokenizer kubernetes_pool pods",
        "Gateway": "tenant_from trusted_headers pool_name extension_objects fallbacks prefill_header kv_source_header "
        "response_mode pick_deadline_ms max_body_mib conformance",
        "Server": "host health_port plaintext tls_certificate tls_key processes share_port drain_s grace_s",
    }

    tenant_header: str = Field(
        default="x-gateway-inference-fairness-id",
        description="Request header that names the tenant, for a fair queue; used only if it is one of --trusted-headers.",
    )
    trusted_headers: CommaList = Field(
        default=(),
        description="Headers that the gateway sets itself, whatever its clients send, separated by commas. Fairness ids, "
        "objectives and priorities in other headers are ignored. Default: none.",
    )
    tenant_from: str = Field(
        default="",
        description="Where the gateway names a request's tenant: header:NAME, which it sets itself, or metadata:NAMESPACE/KEY, "
        "which its own filters set. Default: there is one tenant.",
    )
    host: Name = Field(default="127.0.0.1", description="Address to listen on.")
    port: Port = Field(default=9002, description="Port for the gateway's requests; 0: any free one.")
    health_port: Port = Field(default=9003, description="Port of the health service for probes; 0: any free one.")
    plaintext: bool = Field(default=False, description="No TLS on the gateway's port.")
    tls_certificate: Path | None = Field(
        default=None,
        description="File of the certificate chain (PEM); default: a self-signed one, created at startup.",
    )
    tls_key: Path | None = Field(default=None, description="File of the certificate's private key (PEM).")
    processes: int = Field(default=1, ge=1, le=256, description="Processes that share the ports.")
    share_port: bool = Field(
        default=False, description="Let other processes listen on the same ports too (SO_REUSEPORT)."
    )
    pods: CommaList = Field(
        default=(),
        description="The pool's pods: HOST:PORT, separated by commas; a headless Service's name stands for all of its pods. "
        "Default: the workers that have publishers.",
    )
    kubernetes_pool: bool = Field(
        default=False,
        description="The pool's pods: those that the InferencePool --pool-name selects, read from Kubernetes, each with all of "
        "its target ports.",
    )
    pool_name: Name = Field(default="kvatlas", description="Name of the InferencePool, for metrics and objects.")
    extension_objects: Literal["none", "inference.networking.x-k8s.io", "llm-d.ai"] = Field(
        default="none",
        description="API group whose InferenceObjectives (priorities) and InferenceModelRewrites (v1alpha2) are read from "
        "Kubernetes, of the pool and the pod's namespace.",
    )
    fallbacks: Count = Field(
        default=0,
        description="Additional endpoints in each answer, for the gateway's retries; some gateways accept none.",
    )
    prefill_header: str = Field(
        default="",
        description="Request header with the prefill worker's address, for the engines' sidecars (llm-d: "
        "x-prefiller-host-port). Without it, one worker does both.",
    )
    kv_source_header: str = Field(
        default="",
        description="Request header with the address of the worker to fetch KV from, for the engines' sidecars "
        "(llm-d: x-kv-cache-source-host-port). Without it, the request's body has the address.",
    )
    response_mode: Literal["whole", "headers", "none"] = Field(
        default="whole",
        description="Part of an answer that passes through the picker: `whole`, to read usage and times, only its "
        "`headers`, or `none`; all of it if the gateway sends answers in full duplex.",
    )
    pick_deadline_ms: float = Field(
        default=1_000.0, gt=0, description="Milliseconds for a decision; after that, the request gets a 503."
    )
    max_body_mib: int = Field(default=64, ge=1, le=1024, description="Largest body in MiB; a larger one is refused.")
    drain_s: int = Field(
        default=5,
        ge=0,
        le=600,
        description="Seconds for which a stopping server is not ready but still accepts requests.",
    )
    grace_s: int = Field(default=120, ge=0, le=86_400, description="Seconds for answers in progress after that.")
    conformance: bool = Field(
        default=False, description="Obey the test headers of the Inference Extension's conformance suite."
    )

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """See `ProcessSettings.load`. Certificate and key must be given together, and the pool may have only one source."""
        settings = super().load(**flags)
        if (settings.tls_certificate is None) != (settings.tls_key is None):
            absent = "tls_key" if settings.tls_key is None else "tls_certificate"
            raise SettingsError(missing_line(absent, "both a certificate and its key, or neither"))
        if settings.plaintext and settings.tls_certificate is not None:
            raise SettingsError("--plaintext and --tls-certificate are both given; set only one of them")
        if settings.kubernetes_pool and settings.pods:
            raise SettingsError("--kubernetes-pool and --pods are both given; set only one of them")
        return settings

    @property
    def most_tokenizer_deadline_ms(self) -> float:
        """Half of the time for a decision; the other half is left for the choice."""
        return self.pick_deadline_ms / 2
