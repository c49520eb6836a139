"""The fields of the Gateway API's, its Inference Extension's and Istio's resources that the examples use, strictly.

As of Gateway API v1, inference.networking.k8s.io/v1 and networking.istio.io/v1.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=1, le=65_535)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Metadata(_Strict):
    name: str
    namespace: str = ""
    labels: dict[str, str] = {}


class _MatchLabels(_Strict):
    matchLabels: Annotated[dict[str, str], Field(min_length=1)]  # noqa: N815 - Kubernetes' name


class _PortNumber(_Strict):
    number: Port


class _PickerRef(_Strict):
    group: Literal[""] = ""
    kind: Literal["Service"] = "Service"
    name: str
    port: _PortNumber
    failureMode: Literal["FailClose", "FailOpen"] = "FailClose"  # noqa: N815


class _PoolSpec(_Strict):
    selector: _MatchLabels
    targetPorts: Annotated[list[_PortNumber], Field(min_length=1, max_length=8)]  # noqa: N815
    appProtocol: Literal["http", "kubernetes.io/h2c"] = "http"  # noqa: N815
    endpointPickerRef: _PickerRef  # noqa: N815


class InferencePool(_Strict):
    apiVersion: Literal["inference.networking.k8s.io/v1"]  # noqa: N815
    kind: Literal["InferencePool"]
    metadata: _Metadata
    spec: _PoolSpec


class _Namespaces(_Strict):
    from_: Annotated[Literal["Same", "All"], Field(alias="from")]


class _AllowedRoutes(_Strict):
    namespaces: _Namespaces


class _Listener(_Strict):
    name: str
    port: Port
    protocol: Literal["HTTP", "HTTPS"]
    allowedRoutes: _AllowedRoutes  # noqa: N815


class _GatewaySpec(_Strict):
    gatewayClassName: str  # noqa: N815
    listeners: list[_Listener]


class Gateway(_Strict):
    apiVersion: Literal["gateway.networking.k8s.io/v1"]  # noqa: N815
    kind: Literal["Gateway"]
    metadata: _Metadata
    spec: _GatewaySpec


class _Path(_Strict):
    type: Literal["Exact", "PathPrefix"]
    value: Annotated[str, Field(pattern="^/")]


class _RouteMatch(_Strict):
    path: _Path


class _Backend(_Strict):
    group: str
    kind: str
    name: str


class _Timeouts(_Strict):
    request: Annotated[str, Field(pattern="^[0-9]+(ms|s|m|h)$")]


class _RouteRule(_Strict):
    matches: list[_RouteMatch]
    backendRefs: list[_Backend]  # noqa: N815
    timeouts: _Timeouts


class _ParentRef(_Strict):
    name: str


class _RouteSpec(_Strict):
    parentRefs: list[_ParentRef]  # noqa: N815
    rules: list[_RouteRule]


class HTTPRoute(_Strict):
    apiVersion: Literal["gateway.networking.k8s.io/v1"]  # noqa: N815
    kind: Literal["HTTPRoute"]
    metadata: _Metadata
    spec: _RouteSpec


class _ClientTls(_Strict):
    mode: Literal["DISABLE", "SIMPLE", "MUTUAL", "ISTIO_MUTUAL"]
    insecureSkipVerify: bool = False  # noqa: N815


class _HttpPool(_Strict):
    http2MaxRequests: int  # noqa: N815


class _ConnectionPool(_Strict):
    http: _HttpPool


class _TrafficPolicy(_Strict):
    tls: _ClientTls
    connectionPool: _ConnectionPool  # noqa: N815


class _DestinationSpec(_Strict):
    host: str
    trafficPolicy: _TrafficPolicy  # noqa: N815


class DestinationRule(_Strict):
    apiVersion: Literal["networking.istio.io/v1"]  # noqa: N815
    kind: Literal["DestinationRule"]
    metadata: _Metadata
    spec: _DestinationSpec
