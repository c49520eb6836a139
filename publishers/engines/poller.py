"""Polls an engine's health and metrics over HTTP every second (thin: the parsing is in
`kvatlas_publishers.engines.metrics`)."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from json import loads
from time import time
from typing import Any

import anyio
import httpx

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.tiers import Tier
from kvatlas.engine_access import KEY_CURE, NO_KEY, REFUSED, EngineAccess
from kvatlas.errors import DATA_ERRORS, InvalidValue
from kvatlas.fleet.records import EngineKind, EngineState, WorkerState
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.validation import MAX_BLOCK_TOKENS, MAX_NUMBER
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.diagnoses import Diagnoses
from kvatlas_publishers.engines.decoder_check import diagnose_kind, kind_of_page
from kvatlas_publishers.engines.http_client import engine_http
from kvatlas_publishers.engines.metrics import LoadContext, has_metrics, read_metrics
from kvatlas_publishers.intake.feed_coverage import Serving

POLL_S = 1.0
ANSWER_S = 2.0
_WEIGHTS_PAGES = {EngineKind.VLLM: "/weight_info", EngineKind.SGLANG: "/get_model_info"}
"""Pages that report `weight_version`: vLLM 0.33 with its RL endpoints, and SGLang 0.5.2 and later."""
MAX_PAGE_BYTES = 8 << 20
FAILURES_TO_DOWN = 3
"""Consecutive unanswered polls before a busy engine counts as down. If it refuses connections, two are enough."""
FAILURES_TO_SUSPECT = 2 * FAILURES_TO_DOWN
"""Consecutive unanswered polls before its address is suspected. By then, the feed will have noticed if the process is
gone."""
_HAVE_HEALTH = (EngineKind.VLLM, EngineKind.MOCK, EngineKind.SGLANG, EngineKind.TENSORRT_LLM)
_ADDRESS_CURE = "see the engine's log; if it runs, set --engine-url to its HTTP address"

log = logging.getLogger("kvatlas.publisher")


class EnginePoller:
    """`state` and `load` as of the last poll. An engine counts as down until its first healthy answer."""

    def __init__(
        self,
        url: str,
        context: LoadContext,
        counters: PublisherCounters,
        diagnoses: Diagnoses,
        *,
        on_change: Callable[[EngineState], None] = lambda _: None,
        on_restart: Callable[[], None] = lambda: None,
        on_adapter_moved: Callable[[str], None] = lambda _: None,
        on_new_weights: Callable[[str], None] = lambda _: None,
        on_block_bytes: Callable[[int], None] = lambda _: None,
        sizes: Callable[[], BlockSizes] = BlockSizes,
        on_hybrid: Callable[[], None] = lambda: None,
        on_version: Callable[[], None] = lambda: None,
        feed_alive: Callable[[], bool] = lambda: False,
        poll_s: float = POLL_S,
        access: EngineAccess = NO_KEY,
    ) -> None:
        """`on_change(state)`: the state changed; `on_restart`: the engine's process was replaced;
        `on_adapter_moved(name)`: the adapter is now loaded from another path; `on_new_weights(version)`: the model has new
        weights; `on_block_bytes(bytes)`: the metrics report a new block size in bytes; `sizes`: the known
        sizes; `on_hybrid`: the metrics show a cache for attention other than full, called once; `on_version`: `version` was
        read. `feed_alive`: True if the engine's event socket is connected."""
        self.served_names: Sequence[str] = ()
        """Names under which the engine serves its model, and the paths it was loaded from, as last listed."""
        self._models_listed = False
        self.was_up = False
        self.state = EngineState.DOWN
        self.load: WorkerState | None = None
        self.block_size: int | None = None
        self.block_bytes = 0
        self.serving = Serving()
        self.process_start_s: float | None = None
        self._on_change = on_change
        self._on_restart = on_restart
        self._on_adapter_moved = on_adapter_moved
        self._on_new_weights = on_new_weights
        self._on_block_bytes = on_block_bytes
        self._sizes = sizes
        self._on_hybrid = on_hybrid
        self._on_version = on_version
        self._feed_alive = feed_alive
        self._hybrid = False
        self.adapter_roots: dict[str, str] = {}
        """Path that each adapter was loaded from, as last listed."""
        self.weight_version = ""
        """Version of the model's weights, as last reported; empty: never reported."""
        self.version = ""
        """The version that SGLang reports; empty: unknown."""
        self._weights_page = _WEIGHTS_PAGES.get(context.kind)
        self._url = url.rstrip("/")
        self._access = access
        self._context = context
        self._counters = counters
        self._diagnoses = diagnoses
        self._kind_known = False
        self._has_metrics = has_metrics(context.kind)
        self._poll_s = poll_s
        self._refused: dict[str, int] = {}
        """Status of each page that was refused for lack of a valid key."""
        self._failures = 0.0
        self._asleep = False
        self._asked_server_info = False
        self._log = RateLimitedLog(log, f"worker {context.worker_id}: ")

    async def run(self) -> None:
        """Poll until cancelled."""
        async with self._client() as client:
            while True:
                await self._poll(client)
                await anyio.sleep(self._poll_s)

    async def poll_once(self) -> None:
        """Poll once, now."""
        async with self._client() as client:
            await self._poll(client)

    def compare(self, weight_version: str, adapter_roots: Mapping[str, str]) -> None:
        """Compare with what an earlier publisher saw, and report the differences as changes."""
        version, self.weight_version = self.weight_version, self.weight_version or weight_version
        if version and weight_version not in ("", version):
            self._on_new_weights(version)
        for name, root in adapter_roots.items():
            if self.adapter_roots.setdefault(name, root) != root:
                self._on_adapter_moved(name)

    def _client(self) -> httpx.AsyncClient:
        return engine_http(self._url, self._context.worker_id, self._access, ANSWER_S)

    async def _poll(self, client: httpx.AsyncClient) -> None:
        """Poll the engine. Errors are recorded, not raised."""
        try:
            health = await self._ask_health(client)
            status, page = await self._get(client, "/metrics") if self._has_metrics else (404, b"")
        except (httpx.HTTPError, TimeoutError, InvalidValue) as error:
            self._record_failure(error)
            return
        self._failures = 0
        self._diagnose_address(health)
        if health >= 500:
            self._set_state(EngineState.DOWN)
            return
        if self._context.kind is EngineKind.SGLANG and not self._asked_server_info:
            await self._ask_server_info(client)
        if status == 200:
            self._record_metrics(page.decode(errors="replace"))
        elif status != 404:  # SGLang has the page only with --enable-metrics, TensorRT-LLM none that we can use
            self._counters.load_failures += 1
        # vLLM may have reloaded an adapter from another path
        if self._context.kind is EngineKind.VLLM or not self._models_listed:
            await self._list_models(client)
        await self._ask_weight_version(client)
        self._diagnose_key()
        self._set_state(EngineState.ASLEEP if self._asleep else EngineState.UP)

    async def _ask_health(self, client: httpx.AsyncClient) -> int:
        """The status of the engine's health page. SGLang's health page waits for a token, after the prompts being computed. So
        an engine that was up counts as healthy (200) if only this page is late: `_poll` still needs its metrics page. Whether
        the engine makes progress is not judged here."""
        try:
            return (await self._get(client, "/health"))[0]
        except (httpx.TimeoutException, TimeoutError):
            if not self.was_up or self.state is EngineState.DOWN or not self._has_metrics:
                raise
            return 200

    async def _get(self, client: httpx.AsyncClient, path: str) -> tuple[int, bytes]:
        """Get a page. Returns (status, body). Raises httpx errors, TimeoutError if the whole answer takes too long, or
        InvalidValue if it is too large."""
        body = bytearray()
        with anyio.fail_after(ANSWER_S):
            async with client.stream("GET", f"{self._url}{path}") as answer:
                async for part in answer.aiter_bytes():
                    body += part
                    if len(body) > MAX_PAGE_BYTES:
                        raise InvalidValue(f"page {path} of more than {MAX_PAGE_BYTES} bytes")
        self._refused.pop(path, None)
        if answer.status_code in REFUSED:
            self._refused[path] = answer.status_code
        return answer.status_code, bytes(body)

    async def _list_models(self, client: httpx.AsyncClient) -> None:
        """Read the model list. vLLM lists adapters as models with a parent; `root` is the path that a model was loaded from."""
        try:
            status, body = await self._get(client, "/v1/models")
            listed: Any = loads(body) if status == 200 else None
        except (httpx.HTTPError, TimeoutError, *DATA_ERRORS):
            return
        cards = listed.get("data") if isinstance(listed, dict) else None
        self._models_listed = True
        served: dict[str, None] = {}
        for card in cards if isinstance(cards, list) else ():
            if not isinstance(card, dict):
                continue
            name, root = card.get("id"), card.get("root")
            if not card.get("parent"):
                served.update((one, None) for one in (name, root) if isinstance(one, str) and one)
            elif isinstance(name, str) and isinstance(root, str):
                before = self.adapter_roots.get(name)
                self.adapter_roots[name] = root
                if before not in (None, root):
                    self._on_adapter_moved(name)
        self.served_names = tuple(served) or self.served_names

    async def _ask_weight_version(self, client: httpx.AsyncClient) -> None:
        """Read the version of the weights, which an RL trainer updates. An engine that has no such page is not asked
        again."""
        if self._weights_page is None:
            return
        try:
            status, body = await self._get(client, self._weights_page)
            if status == 404:
                self._weights_page = None
            info: Any = loads(body) if status == 200 else None
        except (httpx.HTTPError, TimeoutError, *DATA_ERRORS):
            return
        version = info.get("weight_version") if isinstance(info, dict) else None
        if isinstance(version, str):
            before, self.weight_version = self.weight_version, version
            if before not in ("", version):
                self._on_new_weights(version)

    def _record_metrics(self, page: str) -> None:
        if not self._kind_known and (found := kind_of_page(page)) is not None:
            self._kind_known = True
            diagnose_kind(self._diagnoses, self._context.kind, found, f"the metrics page at {self._url}")
        try:
            sizes = self._sizes()
            block_bytes = sizes.block_bytes or self._context.block_bytes
            context = replace(self._context, block_bytes=block_bytes, host_block_bytes=sizes.bytes_in(Tier.CPU_DRAM))
            metrics = read_metrics(page, context, int(time() * 1_000_000))
        except DATA_ERRORS as error:
            self._counters.load_failures += 1
            self._log.report("metrics", f"{self._url}/metrics: {error}")
            return
        self._counters.load_samples += 1
        self.load = metrics.load
        self.serving = Serving(metrics.load.running_decodes > 0, metrics.prompt_tokens)
        self.block_size = metrics.block_size
        if metrics.block_bytes not in (0, self.block_bytes):
            self.block_bytes = metrics.block_bytes
            self._on_block_bytes(metrics.block_bytes)
        self._asleep = metrics.asleep
        if metrics.hybrid and not self._hybrid:
            self._hybrid = True
            self._on_hybrid()
        before, now = self.process_start_s, metrics.process_start_s
        if now is not None:
            self.process_start_s = now
            if before is not None and before != now:
                self._asked_server_info = self._models_listed = False
                self._weights_page = _WEIGHTS_PAGES.get(self._context.kind)
                self._on_restart()

    def _record_failure(self, error: Exception) -> None:
        self._counters.load_failures += 1
        self._failures += FAILURES_TO_DOWN / 2 if isinstance(error, httpx.ConnectError) else 1
        if not self._feed_alive():
            self._diagnoses.clear("engine_url")
        elif self._failures >= FAILURES_TO_SUSPECT:
            why = str(error) or type(error).__name__
            seen = f"the event socket is connected, but the engine does not answer at {self._url}: {why}"
            self._diagnoses.set("engine_url", seen, _ADDRESS_CURE)
        if self._failures >= FAILURES_TO_DOWN:
            if self.state is not EngineState.DOWN:
                why = str(error) or type(error).__name__
                self._log.report("down", f"engine at {self._url} does not answer ({why}); reporting it as down")
            self._set_state(EngineState.DOWN)

    def _diagnose_key(self) -> None:
        """Diagnose pages that the engine refused when they were last requested."""
        if not self._refused:
            self._diagnoses.clear("engine_key")
            return
        path, status = next(iter(self._refused.items()))
        sent = "the configured key" if self._access.key_of(self._context.worker_id) else "a call without a key"
        seen = f"the engine at {self._url} refuses {sent}: status {status} for {path}"
        self._diagnoses.set("engine_key", seen, f"{KEY_CURE}, to routers too")

    def _diagnose_address(self, health_status: int) -> None:
        if health_status == 404 and self._context.kind in _HAVE_HEALTH:
            seen = (
                f"the server at {self._url} is not a {self._context.kind.value} engine: it has no /health (status 404)"
            )
            self._diagnoses.set("engine_url", seen, _ADDRESS_CURE)
        else:
            self._diagnoses.clear("engine_url")

    def _set_state(self, state: EngineState) -> None:
        self.was_up = self.was_up or state is not EngineState.DOWN
        if state is not self.state:
            self.state = state
            self._on_change(state)

    async def _ask_server_info(self, client: httpx.AsyncClient) -> None:
        """Read SGLang's capacity from its server info: only later versions report it on the metrics page."""
        for path in ("/server_info", "/get_server_info"):
            try:
                status, body = await self._get(client, path)
                info: Any = loads(body) if status == 200 else None
            except (httpx.HTTPError, TimeoutError, *DATA_ERRORS):
                info = None
            if isinstance(info, dict):
                self._asked_server_info = True
                version = info.get("version")
                self.version = version if isinstance(version, str) else ""
                self._context = replace(
                    self._context,
                    total_request_slots=_count(info, "max_running_requests"),
                    total_tokens=_count(info, "max_total_num_tokens"),
                    block_size=self._context.block_size or _count(info, "page_size", MAX_BLOCK_TOKENS) or None,
                )
                self._on_version()
                return


def _count(info: dict[str, object], name: str, largest: int = MAX_NUMBER) -> int:
    value = info.get(name)
    return value if isinstance(value, int) and 0 < value <= largest else 0
