"""After several engines' notices, a shared store's ledger announces the chains that are complete in a naive model."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvatlas.blocks.hashing import HASH_BYTES, extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.engine_events import EngineBatch, EngineCleared, EngineRemoved, EngineStored
from kvatlas_publishers.ledger.connectors.connector_blocks import TICKS_TO_LIVE
from kvatlas_publishers.ledger.connectors.shared_store_notice import decode, encode
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from kvatlas_publishers.shared_store.receiver import events_of

SIZE, CHAINS, LENGTH = 2, 3, 6
PROMPTS = [
    [number % 2, *range(100, 103), *(1_000 * number + n for n in range(LENGTH * SIZE - 4))] for number in range(CHAINS)
]
"""Two begin alike, but no two different blocks of an engine share a name."""
HASHES = [extend_chain(tokens, SIZE) for tokens in PROMPTS]

writers = st.integers(0, 1)
chains = st.integers(0, CHAINS - 1)
spans = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, 3)).map(lambda span: (span[0], min(LENGTH, sum(span))))


def block(chain: int, index: int) -> bytes:
    return HASHES[chain][index * HASH_BYTES : (index + 1) * HASH_BYTES]


class StoreOfTwoWriters(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.writers = [Ledger(LedgerSettings("m", "t", block_size=SIZE, has_store=True)) for _ in range(2)]
        self.store = Ledger(LedgerSettings("m", "t", block_size=SIZE, keep_untold=True))
        self.tick = 0
        self.known: list[set[bytes]] = [set(), set()]
        self.told_at: dict[bytes, int] = {}

    def name(self, writer: int, chain: int, index: int) -> bytes:
        """A block's name at a writer: each engine has its own hashes."""
        return bytes([writer]) + block(chain, index)

    def event(self, writer: int, chain: int, span: tuple[int, int], **fields: Any) -> EngineStored:
        first, last = span
        return EngineStored(
            [self.name(writer, chain, index) for index in range(first, last)],
            self.name(writer, chain, first - 1) if first else None,
            PROMPTS[chain][first * SIZE : last * SIZE],
            SIZE,
            **fields,
        )

    def fold(self, writer: int, event: Any) -> None:
        ledger = self.writers[writer]
        ledger.fold(EngineBatch([event]))
        assert ledger.store_writes is not None
        for payload in encode(SIZE, ledger.uses_keys, ledger.store_writes.take()):
            events = events_of(decode(payload), self.store.settings, uses_keys=self.store.uses_keys)
            self.store.fold(EngineBatch(events))

    def learn(self, writer: int, chain: int, span: tuple[int, int]) -> list[bytes]:
        """The blocks of an event that the writer can report: those it knows, and those after one that it knows."""
        first, last = span
        told = []
        before = first == 0 or block(chain, first - 1) in self.known[writer]
        for index in range(first, last):
            one = block(chain, index)
            before = before or one in self.known[writer]
            if before:
                told.append(one)
        self.known[writer] |= set(told)
        return told

    @rule(writer=writers, chain=chains, last=st.integers(1, LENGTH))
    def compute(self, writer: int, chain: int, last: int) -> None:
        self.fold(writer, self.event(writer, chain, (0, last)))
        self.learn(writer, chain, (0, last))

    @rule(writer=writers, chain=chains, span=spans)
    def evict(self, writer: int, chain: int, span: tuple[int, int]) -> None:
        names = [self.name(writer, chain, index) for index in range(*span)]
        self.fold(writer, EngineRemoved(names))

    @rule(writer=writers, chain=chains, span=spans)
    def write(self, writer: int, chain: int, span: tuple[int, int]) -> None:
        event = self.event(writer, chain, span, tier=Tier.OBJECT_STORE, offloaded=True, removal_told=False)
        self.fold(writer, event)
        self.told_at |= dict.fromkeys(self.learn(writer, chain, span), self.tick)

    @rule(writer=writers, chain=chains, span=spans)
    def write_without_tokens(self, writer: int, chain: int, span: tuple[int, int]) -> None:
        names = [self.name(writer, chain, index) for index in range(*span)]
        event = EngineStored(names, None, (), SIZE, Tier.OBJECT_STORE, offloaded=True, removal_told=False)
        self.fold(writer, event)
        blocks = {block(chain, index) for index in range(*span)} & self.known[writer]
        self.told_at |= dict.fromkeys(blocks, self.tick)

    @rule(writer=writers)
    def reset(self, writer: int) -> None:
        self.fold(writer, EngineCleared(tuple(Tier)))
        self.told_at.clear()

    @rule(writer=writers)
    def restart_writer(self, writer: int) -> None:
        """Restart a writer; its blocks stay."""
        self.writers[writer].empty()
        self.known[writer].clear()

    @rule()
    def pass_time(self) -> None:
        self.tick += 1
        self.store.fold(EngineBatch(self.store.expire()))
        self.told_at = {one: at for one, at in self.told_at.items() if at + TICKS_TO_LIVE > self.tick}

    @rule()
    def restart_store(self) -> None:
        ages = {(tier, group, name): age for tier, group, name, age in self.store.ages()}
        self.store = Ledger.load(self.store.dump(), self.store.settings)
        self.store.restore_ages(ages)

    @invariant()
    def announces_whole_chains(self) -> None:
        whole = set()
        for chain in range(CHAINS):
            for index in range(LENGTH):
                if block(chain, index) not in self.told_at:
                    break
                whole.add(int.from_bytes(block(chain, index), "little"))
        assert {value for _, _, _, value in self.store.announced()} == whole
        assert self.store.digest.blocks == len(whole)


StoreOfTwoWriters.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
TestStoreOfTwoWriters = StoreOfTwoWriters.TestCase
