"""The load generator against a router that is gone."""

import pytest

from kvatlas.embedded.free_port import free_port
from kvatlas.errors import Unreachable
from kvatlas_simulator.demo.load_generator import send_workload
from kvatlas_simulator.workload import chat_settings, generate_workload


@pytest.mark.anyio
async def test_a_lost_router_is_one_clear_error() -> None:
    workload = generate_workload(chat_settings(seed=1, sessions=2, arrivals_per_s=1e6))
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(Unreachable, match=f"router at {url}: ."):
        await send_workload(workload, "m", url, 1e6, lambda _: None)
