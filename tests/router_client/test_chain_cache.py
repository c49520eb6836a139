"""Remembered hash chains equal computed ones, and are no longer than asked for."""

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.hashing import extend_chain, lazy_chain
from kvatlas.identity import Scope
from router_client.chain_cache import PIECE_BLOCKS, ChainCache
from router_client.prompt import Prompt
from router_client.prompt_chain import FIRST_BLOCKS, PromptChain

PROMPTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(0, 3), st.sampled_from([1, 3])),
    min_size=1,
    max_size=8,
)


@given(PROMPTS)
def test_chains_are_equal_to_computed_ones(prompts: list[tuple[int, int, int, int]]) -> None:
    memory = ChainCache(most_blocks=6 * PIECE_BLOCKS)
    for seed, length, last, block_size in prompts:
        tokens = [*(seed * 1000 + i for i in range(length)), *[7] * last]
        chunks = list(memory.chain(tokens, block_size, 2 * PIECE_BLOCKS))
        assert b"".join(chunks) == extend_chain(tokens, block_size)
        assert all(len(chunk) == 2 * PIECE_BLOCKS * 8 for chunk in chunks[:-1])
        assert len(memory) <= 6 * PIECE_BLOCKS


@given(PROMPTS, st.integers(1, 3))
def test_chains_that_cover_tokens_behind_a_block_are_equal_to_computed_ones(
    prompts: list[tuple[int, int, int, int]], lookahead: int
) -> None:
    memory = ChainCache(most_blocks=6 * PIECE_BLOCKS)
    for seed, length, last, block_size in prompts:
        tokens = [*(seed * 1000 + i for i in range(length)), *[7] * last]
        for ahead in (lookahead, 0):
            chunks = list(memory.chain(tokens, block_size, 2 * PIECE_BLOCKS, ahead))
            assert chunks == list(lazy_chain(tokens, block_size, 2 * PIECE_BLOCKS, lookahead_tokens=ahead))


def test_a_growing_conversation_hashes_only_what_is_new() -> None:
    memory = ChainCache()
    tokens = list(range(16 * 500))
    list(memory.chain(tokens, 16, FIRST_BLOCKS))
    assert memory.hashed_blocks == 500
    tokens += range(16 * 20)
    list(memory.chain(tokens, 16, FIRST_BLOCKS))
    assert memory.hashed_blocks <= 500 + 20 + PIECE_BLOCKS and memory.reused_blocks >= 500 - PIECE_BLOCKS


def test_a_cold_prompt_is_hashed_only_as_far_as_it_is_looked_up() -> None:
    memory = ChainCache()
    next(memory.chain(list(range(16 * 5_000)), 16, FIRST_BLOCKS))
    assert memory.hashed_blocks == FIRST_BLOCKS


def test_a_prompt_with_a_chain_cache_has_the_same_chain() -> None:
    memory = ChainCache()
    tokens = list(range(5_000))
    for _ in range(2):
        with_memory = PromptChain(Prompt.of_tokens(Scope("m", "m"), tokens, memory=memory), 16)
        without = PromptChain(Prompt.of_tokens(Scope("m", "m"), tokens), 16)
        for number in range(3):
            assert with_memory.chunk(number) == without.chunk(number)
    assert memory.hashed_blocks == 312
