from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import EngineKind
from kvatlas_publishers.engines.metrics import _VLLM, LoadContext, read_metrics

VLLM = LoadContext("w", EngineKind.VLLM, block_bytes=1 << 20, locality_domain="rack1")

IMPOSSIBLE = [
    "vllm:num_requests_running +Inf",
    "vllm:num_requests_waiting 1e300",
    "vllm:num_requests_waiting -1",
    "process_start_time_seconds Inf",
    'vllm:cache_config_info{num_gpu_blocks="99999999999999999999"} 1',
    'vllm:cache_config_info{num_gpu_blocks="9007199254740991"} 1',
    'vllm:cache_config_info{num_gpu_blocks="4294967295"} 1',
    f'vllm:cache_config_info{{block_size="{"9" * 5_000}"}} 1',
    "vllm:num_requests_waiting 9007199254740991\nvllm:prompt_tokens_total 9e15\nvllm:request_success_total 1",
    "vllm:num_requests_running 1\n" * 20_000,
]


@pytest.mark.parametrize("page", IMPOSSIBLE, ids=lambda page: page[:60])
def test_a_number_that_no_engine_means_is_refused_in_one_line(page: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        read_metrics(page, LoadContext("w", EngineKind.VLLM, block_bytes=(1 << 32) - 1), 1)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


@given(st.sampled_from(sorted(_VLLM.all)), st.floats() | st.integers(), st.text(max_size=30))
def test_a_page_is_read_or_refused(name: str, value: float, label: str) -> None:
    page = f'{name}{{num_gpu_blocks="{label}",block_size="{value}"}} {value}\n'
    with suppress(InvalidValue):
        read_metrics(page, VLLM, 1).load.pack()


VLLM_PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 12.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000",cache_dtype="auto"} 1.0
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 300.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 50000.0
# TYPE vllm:request_success counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 80.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 20.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 5.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76370000012e+09
"""


def test_a_vllm_rank_has_its_own_samples_as_load() -> None:
    metrics = read_metrics(VLLM_PAGE, LoadContext("w", EngineKind.VLLM, dp_rank=0, block_bytes=1 << 20), 7)
    load = metrics.load
    assert load.running_decodes == 12
    assert load.queued_prefill_tokens == 4 * 500
    assert (load.hbm_capacity_bytes, load.hbm_used_bytes) == (1000 << 20, 250 << 20)
    forward = load.forward_pass
    assert (forward.requests_waiting, forward.active_kv_blocks, forward.total_kv_blocks) == (4, 250, 1000)
    assert (forward.cache_usage, forward.prefix_hit_rate) == (0.25, 0.3)
    assert load.sampled_us == 7
    assert metrics.process_start_s == 1763700000.12
    assert not metrics.asleep


def test_without_a_rank_all_ranks_are_added_up() -> None:
    load = read_metrics(VLLM_PAGE, VLLM, 7).load
    assert load.running_decodes == 15
    assert load.forward_pass.requests_waiting == 5
    assert load.forward_pass.cache_usage == 0.5
    assert load.locality_domain == "rack1"


def test_older_vllm_has_other_names() -> None:
    page = (
        "vllm:gpu_cache_usage_perc 0.75\n"
        "vllm:gpu_prefix_cache_queries_total 10\nvllm:gpu_prefix_cache_hits_total 9\n"
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    )
    metrics = read_metrics(page, VLLM, 7).load.forward_pass
    assert (metrics.cache_usage, metrics.prefix_hit_rate, metrics.total_kv_blocks) == (0.75, 0.9, 0)


@pytest.mark.parametrize(("awake", "asleep"), [(1, False), (0, True)])
def test_a_vllm_engine_can_be_asleep(awake: int, asleep: bool) -> None:
    page = f'vllm:engine_sleep_state{{sleep_state="awake"}} {awake}\nvllm:engine_sleep_state{{sleep_state="discard_all"}} 1\n'
    assert read_metrics(page, VLLM, 7).asleep is asleep


SGLANG_PAGE = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 6.0
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="1"} 6.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m"} 0.5
# TYPE sglang:num_used_tokens gauge
sglang:num_used_tokens{model_name="m"} 3201.0
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{model_name="m"} 0.125
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 9000.0
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{model_name="m"} 10.0
"""


def test_sglang_capacity_comes_from_its_server_info() -> None:
    context = LoadContext("w", EngineKind.SGLANG, block_size=64, total_tokens=6400, total_request_slots=48)
    load = read_metrics(SGLANG_PAGE, context, 7).load
    assert load.running_decodes == 6, "ranks that compute the same requests together count once"
    assert load.queued_prefill_tokens == 2 * 900
    metrics = load.forward_pass
    assert (metrics.active_kv_blocks, metrics.total_kv_blocks) == (51, 100)
    assert (metrics.active_request_slots, metrics.total_request_slots) == (6, 48)
    assert (metrics.cache_usage, metrics.prefix_hit_rate) == (0.5, 0.125)


@pytest.mark.parametrize("page", ["", "<html>no metrics here</html>", "vllm:num_requests_running NaN\n"])
def test_missing_metrics_count_as_zero(page: str) -> None:
    load = read_metrics(page, VLLM, 7).load
    assert (load.running_decodes, load.queued_prefill_tokens, load.hbm_capacity_bytes) == (0, 0, 0)


@pytest.mark.parametrize("usage", ["-1", "7", "+Inf"])
def test_fractions_stay_fractions(usage: str) -> None:
    assert 0 <= read_metrics(f"vllm:kv_cache_usage_perc {usage}\n", VLLM, 7).load.forward_pass.cache_usage <= 1


def test_a_broken_page_is_one_clear_line() -> None:
    with pytest.raises(InvalidValue, match="not a metrics page"):
        read_metrics("vllm:num_requests_running{model\n", VLLM, 7)


def test_an_engine_kind_without_metrics_is_refused() -> None:
    with pytest.raises(InvalidValue, match="lmcache"):
        read_metrics("", LoadContext("w", EngineKind.LMCACHE), 7)


def test_the_block_size_is_the_one_on_the_page() -> None:
    page = 'vllm:cache_config_info{block_size="32",num_gpu_blocks="10"} 1.0\n'
    assert read_metrics(page, LoadContext("w", EngineKind.VLLM), 1).block_size == 32
    assert read_metrics("", LoadContext("w", EngineKind.VLLM), 1).block_size is None


CONFIG = "vllm:cache_config_info{%s} 1\nvllm:kv_cache_usage_perc 0.5\n"


def test_capacity_and_use_are_in_bytes_by_the_models_geometry() -> None:
    page = CONFIG % 'block_size="16",num_gpu_blocks="100",num_cpu_blocks="30"'
    load = read_metrics(page, LoadContext("w", EngineKind.VLLM, token_bytes=1_000), 1).load
    assert (load.hbm_capacity_bytes, load.hbm_used_bytes) == (1_600_000, 800_000)
    assert (load.cpu_capacity_bytes, load.cpu_used_bytes) == (480_000, 0)


def test_an_engine_that_was_given_its_caches_size_says_its_blocks_size() -> None:
    page = CONFIG % 'block_size="16",num_gpu_blocks="100",kv_cache_memory_bytes="1000050",kv_offloading_size="2.5"'
    metrics = read_metrics(page, LoadContext("w", EngineKind.VLLM), 1)
    assert metrics.block_bytes == 10_000
    assert (metrics.load.hbm_capacity_bytes, metrics.load.hbm_used_bytes) == (1_000_000, 500_000)
    assert metrics.load.cpu_capacity_bytes == 5 << 29
    set_by_hand = read_metrics(page, LoadContext("w", EngineKind.VLLM, block_bytes=7), 1)
    assert set_by_hand.load.hbm_capacity_bytes == 700
    unknown = read_metrics(CONFIG % 'num_gpu_blocks="100",kv_cache_memory_bytes="None"', VLLM, 1)
    assert unknown.block_bytes == 0


def test_sglangs_cache_in_the_hosts_memory_is_counted() -> None:
    page = "sglang:max_total_num_tokens 1000\nsglang:num_used_tokens 100\n"
    page += "sglang:hicache_host_total_tokens 4000\nsglang:hicache_host_used_tokens 640\n"
    load = read_metrics(page, LoadContext("w", EngineKind.SGLANG, block_size=64, token_bytes=10), 1).load
    assert (load.cpu_capacity_bytes, load.cpu_used_bytes) == (40_000, 6_400)


@pytest.mark.parametrize(
    ("kind", "moved"),
    [
        (EngineKind.VLLM, "vllm:iteration_tokens_total_count"),
        (EngineKind.VLLM, "vllm:generation_tokens_total"),
        (EngineKind.SGLANG, "sglang:generation_tokens_total"),
        (EngineKind.SGLANG, "sglang:num_requests_total"),
    ],
)
def test_what_an_engine_computes_moves_one_number(kind: EngineKind, moved: str) -> None:
    def computed(page: str) -> int:
        return read_metrics(page, LoadContext("w", kind), 1).load.computed

    assert computed("") == 0
    assert computed(f"{moved} 8\n") > computed(f"{moved} 7\n") > 0
    assert computed("vllm:num_requests_waiting 9\nsglang:num_queue_reqs 9\n") == 0
