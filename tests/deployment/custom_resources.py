"""Models made from the definitions of custom resources. cloudcoil's take seconds to build, and every process of a test run
collects all tests, so they are imported on first use."""

from functools import cache
from importlib import import_module

from pydantic import BaseModel

from tests.deployment import gateway_resources

CLOUDCOIL = {
    "Certificate": "cert_manager.v1",
    "Issuer": "cert_manager.v1",
    "PodMonitor": "prometheus_operator.v1",
    "PrometheusRule": "prometheus_operator.v1",
    "ScaledObject": "keda.v1alpha1",
    "ServiceMonitor": "prometheus_operator.v1",
}


@cache
def model_of(kind: str) -> type[BaseModel] | None:
    """The model of a kind; None for Kubernetes' own kinds."""
    module = import_module(f"cloudcoil.models.{CLOUDCOIL[kind]}") if kind in CLOUDCOIL else gateway_resources
    found: type[BaseModel] | None = getattr(module, kind, None)
    return found
