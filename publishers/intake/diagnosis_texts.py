"""Diagnosis texts for a feed whose blocks are left out, by reason and engine (pure)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvatlas.fleet.records import EngineKind
from kvatlas_publishers.intake.feed_coverage import Reason, Verdict


class Circumstances(NamedTuple):
    """`sample`: the last line about something unreadable; `zmq`: events come over ZMQ; `replay`: there is a replay socket."""

    engine: EngineKind
    zmq: bool
    replay: bool
    sample: str = ""


_RESET = {
    EngineKind.VLLM: "reset its prefix cache (POST /reset_prefix_cache) or restart it",
    EngineKind.SGLANG: "reset its cache (POST /flush_cache) or restart it",
}
_TOO_LATE = "to miss nothing from now on, "


def text_of(verdict: Verdict, where: Circumstances) -> tuple[str, str]:
    """(what was seen, the cure) for a verdict with a reason."""
    reason = verdict.reason
    assert reason is not None, "a verdict without a reason is no diagnosis"
    why, cure = _TEXTS[reason](where)
    if reason is Reason.NO_EVENTS:
        return f"the engine serves requests, but nothing is published: {why}", cure
    if reason is Reason.HOLES:
        return f"events arrive, but {why}", cure
    published = "none" if verdict.left_out == verdict.told else "less than a tenth"
    share = f"{100 * verdict.of_reason // verdict.left_out} % of those left out"
    return f"events arrive, but {published} of them is published: {why} ({share})", cure


def _unknown_parent(where: Circumstances) -> tuple[str, str]:
    why = "their parent block is unknown: it was stored before the publisher connected, or its batch was lost"
    again = f"{_RESET.get(where.engine, 'restart the engine')}: blocks stored after that are published"
    if not where.zmq:
        return why, f"to start again, {again}"
    if where.replay:
        return why, f"raise the engine's buffer_steps, so that replay reaches farther back; to start again, {again}"
    return why, f"{_TOO_LATE}set --replay-endpoint to the engine's replay socket; to start again, {again}"


def _unreadable_events(where: Circumstances) -> tuple[str, str]:
    why = f"events can't be read; the last one: {where.sample}" if where.sample else "events can't be read"
    if where.engine is EngineKind.TENSORRT_LLM:
        return why, "start trtllm-serve with KV cache manager V1, whose block hashes are v1_block_key's"
    return why, "check the engine's version against docs/engines.md; upgrade kvatlas, or set another --engine"


def _no_events(where: Circumstances) -> tuple[str, str]:
    turned_on = {
        EngineKind.SGLANG: "start it with --kv-events-config and without --disable-radix-cache",
        EngineKind.TENSORRT_LLM: "start it with event_buffer_max_size above 0 and enable_block_reuse",
        EngineKind.OPEN: "make it send its events to this publisher",
    }
    config = '{"enable_kv_cache_events": true, "publisher": "zmq"}'
    usual = f"start it with --enable-prefix-caching and --kv-events-config '{config}'"
    cure = turned_on.get(where.engine, usual)
    return "no events of stored blocks arrive", f"{cure}; with several ranks, set --endpoint to this rank's socket"


def _holes(where: Circumstances) -> tuple[str, str]:
    why = "batches are lost repeatedly, and all known blocks are dropped each time"
    if where.replay:
        return why, "raise the engine's buffer_steps and hwm; check that its replay socket answers in time"
    return why, "start the engine with replay_endpoint in --kv-events-config, and set --replay-endpoint to it"


_TEXTS: Mapping[Reason, Callable[[Circumstances], tuple[str, str]]] = {
    Reason.UNKNOWN_PARENT: _unknown_parent,
    Reason.ZERO_PARENT: lambda _: (
        "they name 0 as their parent, and no block has that name",
        "make the engine send no parent (null) for a prompt's first block; upgrade it if it is an older version",
    ),
    Reason.OTHER_BLOCK_SIZE: lambda _: (
        "they have another block size than the publisher's",
        "leave --block-size out, or set it to the size in the engine's events",
    ),
    Reason.UNINDEXABLE: lambda _: (
        "their token ids exceed 32 bits or don't fill their blocks, or their adapter or salt is not a valid scope name",
        "see docs/engines.md for what is left out; image placeholders must be token ids",
    ),
    Reason.NO_TOKENS: lambda _: (
        "they are reported by hash only, never with token ids",
        "make the engine report token ids (vLLM's connectors: self_describing_kv_events), or reset its cache",
    ),
    Reason.ADAPTER_UNNAMED: lambda _: (
        "they belong to adapters that the engine reports by id only",
        "set --adapter-ids id=name, or upgrade the engine (vLLM 0.14 and later report names)",
    ),
    Reason.REMOVAL_UNTOLD: lambda _: (
        "a connector stored them, and no event reports their removal",
        "set --store-ttl-s to less than their lifetime there, or set --shared-store",
    ),
    Reason.NO_FULL_ATTENTION: lambda _: (
        "the model has no full attention, and only blocks of full attention are published",
        "set --no-events: its cache is then predicted from the requests sent to it",
    ),
    Reason.UNREADABLE_EVENTS: _unreadable_events,
    Reason.UNREADABLE_PAYLOADS: lambda where: (
        f"the payloads are not batches of {where.engine.value}'s events"
        + (f"; the last one: {where.sample}" if where.sample else ""),
        "set --endpoint to the engine's event socket, and --engine to its kind",
    ),
    Reason.IGNORED: lambda _: (
        "their batches are ignored: they come from another rank or engine, or too many earlier ones were unreadable",
        "run one publisher per rank (--dp-rank or --dp-size); the publisher's log lists what was unreadable",
    ),
    Reason.NO_EVENTS: _no_events,
    Reason.HOLES: _holes,
}
