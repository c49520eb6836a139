"""The benchmarks' engines speak the protocols of real ones."""

import msgpack
import zmq

from benchmarks.peer.engine_process import CHAIN, chain_tokens, last_chain
from benchmarks.peer.engines import Engines, encode_stored
from kvatlas.blocks.hashing import HASH_BYTES, extend_chain
from kvatlas_publishers.engines.vllm import decode_batch


def test_a_batch_is_one_that_our_adapter_reads() -> None:
    tokens = list(range(32))
    payload, last = encode_stored(tokens, 16)
    (event,) = decode_batch(payload).events
    chain = extend_chain(tokens, 16)
    assert list(event.token_ids) == tokens  # type: ignore[union-attr]
    assert last == int.from_bytes(chain[-HASH_BYTES:], "little")


def test_a_continued_chain_is_the_whole_one() -> None:
    tokens = chain_tokens(0, 0)
    _, half = encode_stored(tokens[: len(tokens) // 2], 16)
    _, rest = encode_stored(tokens[len(tokens) // 2 :], 16, half)
    assert rest == encode_stored(tokens, 16)[1]


def test_the_last_chain_is_the_last_complete_one() -> None:
    assert last_chain(3, hashes=16, messages=4) == chain_tokens(3, 0)
    assert last_chain(3, hashes=CHAIN, messages=4) == chain_tokens(3, 3)


def test_a_subscriber_gets_every_batch_in_order() -> None:
    with Engines(1) as engines, zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(engines.endpoints[0])
        engines.wait_for_subscribers()
        for number in range(3):
            engines.publish(0, msgpack.packb(number))
        assert [subscriber.recv_multipart()[1:] for _ in range(3)] == [
            [number.to_bytes(8, "big"), msgpack.packb(number)] for number in range(3)
        ]
