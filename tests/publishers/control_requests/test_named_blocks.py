"""Finds blocks by their names in an engine."""

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.hashing import extend_chain, unpack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.identity import Scope
from kvatlas_publishers.control_requests.named_blocks import hashes_along
from kvatlas_publishers.engine_events import EngineBatch, EngineRemoved, EngineStored
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings

SCOPE = Scope("m", "m")
SIZE, BLOCKS = 4, 300
TOKENS = list(range(SIZE * BLOCKS))
CHAIN = unpack_hashes(extend_chain(TOKENS, SIZE))
NAMES = [7_000 + block for block in range(BLOCKS)]


def ledger(*batches: EngineBatch) -> Ledger:
    made = Ledger(LedgerSettings("m", "m"))
    for batch in batches:
        made.fold(batch)
    return made


def stored(first: int, last: int, *, names: list[int] | list[bytes] = NAMES) -> EngineBatch:
    parent = names[first - 1] if first else None
    return EngineBatch(
        [EngineStored(names[first:last], parent, TOKENS[first * SIZE : last * SIZE], SIZE, Tier.HBM)], 1.0
    )


@given(st.lists(st.integers(1, BLOCKS), min_size=1, max_size=5, unique=True), st.integers(0, BLOCKS), st.data())
def test_an_engines_hashes_of_a_prompt_are_those_of_its_first_blocks_that_it_holds(
    cuts: list[int], asked: int, data: st.DataObject
) -> None:
    ends = sorted(cuts)
    held = ledger(*(stored(first, last) for first, last in zip([0, *ends], ends, strict=False)))
    assert hashes_along(held.lineage, SCOPE.scope_id, CHAIN[:asked]) == NAMES[: min(asked, ends[-1])]
    gone = data.draw(st.integers(0, ends[-1] - 1))
    held.fold(EngineBatch([EngineRemoved([NAMES[gone]], Tier.HBM)], 2.0))
    assert hashes_along(held.lineage, SCOPE.scope_id, CHAIN[:asked]) == NAMES[: min(asked, gone)]


def test_nothing_is_said_of_other_prompts_scopes_or_hashes_that_are_no_numbers() -> None:
    held = ledger(stored(0, 8))
    assert hashes_along(held.lineage, SCOPE.scope_id, []) == []
    assert hashes_along(held.lineage, SCOPE.scope_id, CHAIN[1:]) == []
    assert hashes_along(held.lineage, Scope("m", "m", "adapter").scope_id, CHAIN) == []
    named = [name.to_bytes(32, "big") for name in NAMES]
    assert hashes_along(ledger(stored(0, 8, names=named)).lineage, SCOPE.scope_id, CHAIN) == []
