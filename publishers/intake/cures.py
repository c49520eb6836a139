"""What to do about a feed that is left out, by reason and engine: the text of its diagnosis (pure)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvatlas.fleet.records import EngineKind
from kvatlas_publishers.intake.verdict import Reason, Verdict


class Circumstances(NamedTuple):
    """`sample`: the last line that said what can't be read; `zmq`: events come over ZMQ, and `replay`: with a replay socket."""

    engine: EngineKind
    zmq: bool
    replay: bool
    sample: str = ""


_RESET = {
    EngineKind.VLLM: "reset its prefix cache (POST /reset_prefix_cache) or restart it",
    EngineKind.SGLANG: "reset its cache (POST /flush_cache) or restart it",
}
_TOO_LATE = "so that nothing is missed from now on, "


def text_of(verdict: Verdict, where: Circumstances) -> tuple[str, str]:
    """What is seen, and the cure. The verdict has a reason."""
    reason = verdict.reason
    assert reason is not None, "a verdict without a reason is no diagnosis"
    why, cure = _TEXTS[reason](where)
    if reason is Reason.NO_EVENTS:
        return f"the engine serves requests, and nothing is published: {why}", cure
    if reason is Reason.HOLES:
        return f"events arrive, and {why}", cure
    published = "nothing" if verdict.left_out == verdict.told else "less than a tenth"
    share = f"{100 * verdict.of_reason // verdict.left_out} % of what is left out"
    return f"events arrive, and {published} of them is published: {why} ({share})", cure


def _unknown_parent(where: Circumstances) -> tuple[str, str]:
    why = "the block before them is not known: it was stored before the publisher listened, or its batch was lost"
    again = f"{_RESET.get(where.engine, 'restart the engine')}: its blocks count from then on"
    if not where.zmq:
        return why, f"to begin anew, {again}"
    if where.replay:
        return why, f"raise the engine's buffer_steps, so that replay reaches back; to begin anew, {again}"
    return why, f"{_TOO_LATE}set --replay-endpoint to the engine's replay socket; to begin anew, {again}"


def _unreadable_events(where: Circumstances) -> tuple[str, str]:
    why = f"events can't be read; the last: {where.sample}" if where.sample else "events can't be read"
    if where.engine is EngineKind.TENSORRT_LLM:
        return why, "start trtllm-serve with KV cache manager V1, whose block hashes are v1_block_key's"
    return why, "see which versions of the engine docs/engines.md lists; upgrade kvatlas, or set another --engine"


def _no_events(where: Circumstances) -> tuple[str, str]:
    turned_on = {
        EngineKind.SGLANG: "start it with --kv-events-config and without --disable-radix-cache",
        EngineKind.TENSORRT_LLM: "start it with event_buffer_max_size above 0 and enable_block_reuse",
        EngineKind.OPEN: "let it send its events to this publisher",
    }
    config = '{"enable_kv_cache_events": true, "publisher": "zmq"}'
    usual = f"start it with --enable-prefix-caching and --kv-events-config '{config}'"
    cure = turned_on.get(where.engine, usual)
    return "no event of stored blocks comes", f"{cure}; with several ranks, set --endpoint to this rank's socket"


def _holes(where: Circumstances) -> tuple[str, str]:
    why = "batches are lost again and again: each time everything known is dropped"
    if where.replay:
        return why, "raise the engine's buffer_steps and hwm; does its replay socket answer in time?"
    return why, "start the engine with replay_endpoint in --kv-events-config, and set --replay-endpoint to it"


_TEXTS: Mapping[Reason, Callable[[Circumstances], tuple[str, str]]] = {
    Reason.UNKNOWN_PARENT: _unknown_parent,
    Reason.ZERO_PARENT: lambda _: (
        "the block before them is named 0, and no block has that name",
        "let the engine name no parent (null) before a prompt's first block; upgrade it if it is an older version",
    ),
    Reason.OTHER_BLOCK_SIZE: lambda _: (
        "they are of another block size than the publisher's",
        "leave --block-size out, or set it to the size in the engine's events",
    ),
    Reason.UNINDEXABLE: lambda _: (
        "their token ids are above 32 bits, or don't fill their blocks, or an adapter or salt can't name a scope",
        "see docs/engines.md for what is left out; of images the placeholders must be token ids",
    ),
    Reason.NO_TOKENS: lambda _: (
        "they are reported by hash only, and were never reported with token ids",
        "make the engine report token ids (vLLM's connectors: self_describing_kv_events), or reset its cache",
    ),
    Reason.ADAPTER_UNNAMED: lambda _: (
        "they belong to adapters that the engine reports by id only",
        "set --adapter-ids id=name, or upgrade the engine (vLLM 0.14 and later report names)",
    ),
    Reason.REMOVAL_UNTOLD: lambda _: (
        "a connector stored them, and no event says when they are gone",
        "set --store-ttl-s to less than they live there, or --shared-store",
    ),
    Reason.NO_FULL_ATTENTION: lambda _: (
        "the model has no full attention, without which nothing is announced",
        "set --no-events: what it holds is then predicted from the requests that it gets",
    ),
    Reason.UNREADABLE_EVENTS: _unreadable_events,
    Reason.UNREADABLE_PAYLOADS: lambda where: (
        f"what comes is no batch of {where.engine.value}'s events"
        + (f"; the last: {where.sample}" if where.sample else ""),
        "set --endpoint to the engine's event socket, and --engine to its kind",
    ),
    Reason.IGNORED: lambda _: (
        "their batches are ignored: of another rank or engine, or too many before them could not be read",
        "give each rank a publisher of its own (--dp-rank or --dp-size); see the publisher's log for what can't be read",
    ),
    Reason.NO_EVENTS: _no_events,
    Reason.HOLES: _holes,
}
