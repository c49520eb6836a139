"""A real Prometheus (Debian's package) as a child process."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import httpx

from kvatlas.embedded import ServerProcess
from kvatlas.embedded.free_port import LOOPBACK
from tests.http_client import trusted


class Prometheus(ServerProcess):
    """Scrapes these ports every second, and evaluates the rules."""

    name = "prometheus"

    def __init__(self, ports: Sequence[int], folder: Path, rules: Path) -> None:
        super().__init__(Path(shutil.which("prometheus") or "prometheus"), port=0, data_dir=None, start_deadline_s=30)
        self._config = folder / "prometheus.json"
        targets = [{"targets": [f"{LOOPBACK}:{port}" for port in ports]}]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "kvatlas", "static_configs": targets}],
        }
        self._config.write_text(json.dumps(config))

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def _command(self) -> list[str]:
        data = f"--storage.tsdb.path={self.data_dir}"
        return [
            f"--config.file={self._config}",
            data,
            f"--web.listen-address={LOOPBACK}:{self.port}",
            "--log.level=error",
            "--enable-feature=exemplar-storage",
        ]

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=1, trust_env=False, verify=trusted()).status_code == 200
        except httpx.HTTPError:
            return False
