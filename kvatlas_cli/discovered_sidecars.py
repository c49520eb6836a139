"""Publisher settings for an engine that describes itself over HTTP."""

from pathlib import Path
from typing import Any

from kvatlas.engine_access import NO_KEY, EngineAccess
from kvatlas.fleet.records import EngineKind
from kvatlas.settings import PublishSettings
from kvatlas_cli.output import print_notice


async def discover_sidecars(
    flags: dict[str, str], servers: dict[str, object], state_dir: Path, access: EngineAccess = NO_KEY
) -> list[PublishSettings]:
    """The publisher settings of each rank of an engine, either taken from the flags or discovered. Raises Unreachable.

    The block size is learned from events, because engines with context parallelism or several kinds of attention have blocks
    of a size other than the one that their flag gives.
    """
    from kvatlas_publishers.engines.discovery import discover, shift_port

    folder = state_dir / "publishers" / flags["worker_id"]
    folder.mkdir(parents=True, exist_ok=True)
    shared: dict[str, Any] = {**servers, "engine": EngineKind.VLLM, **flags, "state_dir": folder}
    if "endpoint" in flags and "model_id" in flags:
        return [PublishSettings.load(**shared)]
    kind = EngineKind(flags["engine"]) if flags.get("engine") in set(EngineKind) else None
    offer = await discover(
        flags["engine_url"],
        model_id=flags.get("model_id"),
        kind=kind,
        events="endpoint" not in flags,
        access=access,
        worker_id=flags["worker_id"],
    )
    for note in offer.notes:
        print_notice(f"worker {flags['worker_id']}: {note}")
    shared |= {"engine": offer.kind, "model_id": offer.model_id, "role": offer.role, "eagle": offer.eagle}
    found = offer.connector
    if found is not None and "kv_connector" not in flags:
        shared |= {"kv_connector": found.connector, "kv_port": found.port, "kv_tiers": found.tiers}
    shared |= {"bootstrap_port": offer.bootstrap_port, **flags}
    if "endpoint" in flags or offer.kind is EngineKind.TENSORRT_LLM:
        return [PublishSettings.load(**shared)]
    if not offer.sources:
        shared = {"block_size": offer.block_size, **shared, "events": False}
        return [PublishSettings.load(**shared, dp_rank=rank) for rank in offer.ranks]
    settings: list[PublishSettings] = []
    for source in offer.sources:
        back = -(source.rank or 0)  # settings contain the ports of the first rank
        replay = source.replay_endpoint
        own = {
            "endpoint": shift_port(source.endpoint, back),
            "replay_endpoint": shift_port(replay, back) if replay else None,
            "topic": source.topic,
            "dp_rank": source.rank,
        }
        settings.append(PublishSettings.load(**{**shared, **own, **flags}))
    return settings
