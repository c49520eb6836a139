"""`kvatlas rates`: the workers' rates that routers have learned."""

from dataclasses import asdict
from typing import Any

from kvatlas.blocks.tiers import Tier
from kvatlas.cost import EngineRates
from kvatlas.cost.learned_rates import LearnedRates, estimate_of, learned_rates_of
from kvatlas.cost.regression import Evidence
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.reservations import RedisReservations
from kvatlas.settings import QuerySettings
from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.output import count_text, print_json, print_table
from kvatlas_cli.runner import run_query
from kvatlas_cli.store_connection import connect_store


@with_settings(QuerySettings)
def rates(settings: QuerySettings, as_json: JsonFlag = False) -> None:
    """Show each worker's learned rates for the cost profile `engine`, or the defaults if none are learned yet."""
    run_query("rates", settings, _rates(settings, as_json))


async def _rates(settings: QuerySettings, as_json: bool) -> None:
    async with connect_store(settings) as store:
        fleet, reservations = FleetStore(store), RedisReservations(store)
        found: dict[str, LearnedRates] = {}
        for pool_id in await fleet.pools():
            evidence = await reservations.read_evidence(pool_id)
            for worker_id in await fleet.pool(pool_id):
                found[worker_id] = _estimate_rates(evidence.get(worker_id, Evidence()))
    if as_json:
        print_json([_jsonable(worker_id, found[worker_id]) for worker_id in sorted(found)])
        return
    print_table(
        f"{count_text(len(found), 'worker')}; microseconds, and the recent errors of the estimates",
        (
            "worker",
            "requests",
            "prefill token",
            "attention pair",
            "TTFT overhead",
            "TTFT error",
            "decode step",
            "per running request",
            "per KV token",
            "TPOT error",
            "per MiB read from remote HBM / CPU DRAM / local SSD / object store",
        ),
        [_row(worker_id, found[worker_id]) for worker_id in sorted(found)],
    )


def _estimate_rates(evidence: Evidence) -> LearnedRates:
    return learned_rates_of(estimate_of(evidence, EngineRates()), EngineRates())


def _row(worker_id: str, learned: LearnedRates) -> tuple[str, ...]:
    rates = learned.rates
    return (
        worker_id,
        str(learned.requests),
        f"{rates.prefill_us_per_token:.1f}",
        f"{rates.attention_us_per_token_pair:.5f}",
        f"{learned.overhead_us:.0f}",
        f"{learned.first_error:.0%}" if learned.requests else "-",
        f"{rates.tpot_base_us:.0f}",
        f"{rates.tpot_us_per_running:.1f}",
        f"{rates.tpot_us_per_kv_token:.4f}",
        f"{learned.next_error:.0%}" if learned.requests else "-",
        " / ".join(f"{rates.read_rate(tier).us_per_mib:.0f}" for tier in Tier if tier is not Tier.HBM),
    )


def _jsonable(worker_id: str, learned: LearnedRates) -> dict[str, Any]:
    return {"worker": worker_id, **asdict(learned)}
