"""The cache in its simplest form: lists that are searched from end to end. It has no CPU tier and no hashes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvatlas_simulator.cache import BlockUse, EvictionPolicy, Namespace, PrefixSettings

Prefix = tuple[Namespace, tuple[int, ...]]


@dataclass(eq=False)
class Copy:
    """A block that is not free."""

    tokens: list[int]
    holders: set[str]
    prefix: Prefix | None = None
    cached_at: int = 0
    released_at: int = 0


@dataclass
class Held:
    """A live sequence."""

    namespace: Namespace
    tokens: list[int]
    copies: list[Copy]


@dataclass
class NaiveCache:
    num_blocks: int
    size: int
    policy: EvictionPolicy
    settings: PrefixSettings
    clock: Callable[[], float]
    copies: list[Copy] = field(default_factory=list)
    sequences: dict[str, Held] = field(default_factory=dict)
    uses: dict[Prefix, int] = field(default_factory=dict)
    used_at: dict[Prefix, float] = field(default_factory=dict)
    tick: int = 0
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("allocations", "deallocations", "hits", "misses", "evictions", "copies", "failures"), 0
        )
    )

    @property
    def held_blocks(self) -> int:
        return sum(1 for copy in self.copies if copy.holders)

    @property
    def available(self) -> int:
        return self.num_blocks - self.held_blocks

    @property
    def prefixes(self) -> set[Prefix]:
        return {copy.prefix for copy in self.copies if copy.prefix is not None}

    def copies_of(self, prefix: Prefix) -> list[Copy]:
        return sorted((copy for copy in self.copies if copy.prefix == prefix), key=lambda copy: copy.cached_at)

    def children_of(self, prefix: Prefix) -> list[Prefix]:
        namespace, tokens = prefix
        return [each for each in self.prefixes if each[0] == namespace and each[1][: -self.size] == tokens]

    def leaves(self) -> list[Prefix]:
        return [prefix for prefix in self.prefixes if not self.children_of(prefix)]

    def held(self, prefix: Prefix) -> bool:
        return any(copy.holders for copy in self.copies_of(prefix))

    def expired(self, prefix: Prefix) -> bool:
        ttl_s = self.settings.ttl_s
        return ttl_s is not None and not self.held(prefix) and self.clock() - self.used_at[prefix] >= ttl_s

    def match(self, prompt: Sequence[int], namespace: Namespace) -> list[Prefix]:
        found: list[Prefix] = []
        for end in range(self.size, len(prompt), self.size):
            prefix = (namespace, tuple(prompt[:end]))
            if not self.settings.sharing or prefix not in self.prefixes or self.expired(prefix):
                break
            found.append(prefix)
        return found if len(found) * self.size >= self.settings.min_tokens else []

    def allocate(self, name: str, prompt: Sequence[int], namespace: Namespace, chunk: int) -> bool:
        """`chunk`: number of tokens written after the match."""
        found = self.match(prompt, namespace)
        rest = list(prompt[len(found) * self.size :][:chunk])
        needed = sum(not self.copies_of(prefix)[0].holders for prefix in found) - (-len(rest) // self.size)
        if needed > self.available:
            self.counts["failures"] += 1
            return False
        held = self.sequences[name] = Held(namespace, [], [])
        lookups = (len(prompt) - 1) // self.size if self.settings.sharing else 0
        self.counts["hits"] += len(found)
        self.counts["misses"] += lookups - len(found)
        for prefix in found:
            copy = self.copies_of(prefix)[0]
            copy.holders.add(name)
            held.copies.append(copy)
            held.tokens += copy.tokens
            self.uses[prefix] = self.uses.get(prefix, 0) + 1
            self.used_at[prefix] = self.clock()
        self._write(name, rest)
        return True

    def extend(self, name: str, tokens: Sequence[int]) -> bool:
        held = self.sequences[name]
        blocks = -(-(len(held.tokens) + len(tokens)) // self.size) - len(held.copies)
        if blocks + self._shares_partial(held) > self.available:
            self.counts["failures"] += 1
            return False
        self._write(name, tokens)
        return True

    def fork(self, name: str, new: str, blocks: int) -> None:
        held = self.sequences[name]
        self.sequences[new] = Held(held.namespace, held.tokens[: blocks * self.size], held.copies[:blocks])
        for copy in held.copies[:blocks]:
            copy.holders.add(new)

    def free(self, name: str) -> None:
        for copy in reversed(self.sequences.pop(name).copies):
            copy.holders.discard(name)
            if copy.holders:
                continue
            if copy.prefix is None:
                self._drop(copy)
            else:
                self.tick += 1
                copy.released_at = self.tick
                self.used_at[copy.prefix] = self.clock()
        self._limit_prefixes()

    def gc(self, keep: int | None) -> int:
        """Free blocks, and return their number."""
        before = len(self.copies)
        for prefix in [prefix for prefix in self.prefixes if self.expired(prefix)]:
            for copy in self.copies_of(prefix):
                self._drop(copy)
        while keep is not None and len(self.copies) - self.held_blocks > keep:
            self._evict()
        return before - len(self.copies)

    def _shares_partial(self, held: Held) -> bool:
        return bool(len(held.tokens) % self.size) and len(held.copies[-1].holders) > 1

    def _write(self, name: str, tokens: Sequence[int]) -> None:
        held = self.sequences[name]
        if tokens and self._shares_partial(held):
            shared = held.copies[-1]
            held.copies[-1] = self._new(name, list(shared.tokens))
            shared.holders.discard(name)
            self.counts["copies"] += 1
        held.tokens += tokens
        while len(held.copies) * self.size < len(held.tokens):
            held.copies.append(self._new(name, []))
        for index, copy in enumerate(held.copies):
            copy.tokens = held.tokens[index * self.size : (index + 1) * self.size]
        if self.settings.sharing and len(held.tokens) >= self.settings.min_tokens:
            for index, copy in enumerate(held.copies):
                if copy.prefix is None and len(copy.tokens) == self.size:
                    copy.prefix = (held.namespace, tuple(held.tokens[: (index + 1) * self.size]))
                    self.tick += 1
                    copy.cached_at = self.tick
                    self.used_at[copy.prefix] = self.clock()
            self._limit_prefixes()

    def _new(self, name: str, tokens: list[int]) -> Copy:
        if len(self.copies) == self.num_blocks:
            self._evict()
        self.counts["allocations"] += 1
        copy = Copy(tokens, {name})
        self.copies.append(copy)
        return copy

    def _evict(self) -> None:
        candidates = [
            copy
            for copy in self.copies
            if copy.prefix is not None
            and not copy.holders
            and (len(self.copies_of(copy.prefix)) > 1 or not self.children_of(copy.prefix))
        ]
        self.counts["evictions"] += 1
        self._drop(min(candidates, key=self._key))

    def _key(self, copy: Copy) -> tuple[float, ...]:
        assert copy.prefix is not None
        depth = len(copy.prefix[1]) // self.size - 1
        return self.policy.key(BlockUse(copy.cached_at, copy.released_at, self.uses.get(copy.prefix, 0), depth))

    def _drop(self, copy: Copy) -> None:
        self.copies.remove(copy)
        self.counts["deallocations"] += 1
        if copy.prefix is not None and copy.prefix not in self.prefixes:
            self.uses.pop(copy.prefix, None)

    def _limit_prefixes(self) -> None:
        limit = self.settings.max_prefixes
        while limit is not None and len(self.leaves()) > limit:
            tails = [self._tail(leaf) for leaf in self.leaves()]
            tails = [tail for tail in tails if not any(self.held(prefix) for prefix in tail)]
            if not tails:
                return
            tail = min(tails, key=lambda tail: max(self._key(copy) for copy in self.copies_of(tail[0])))
            for prefix in tail:
                for copy in self.copies_of(prefix):
                    self.counts["evictions"] += 1
                    self._drop(copy)

    def _tail(self, leaf: Prefix) -> list[Prefix]:
        """The prefixes that no other one shares, leaf first."""
        namespace, tokens = leaf
        tail = [leaf]
        for end in range(len(tokens) - self.size, 0, -self.size):
            prefix = (namespace, tokens[:end])
            if len(self.children_of(prefix)) > 1:
                break
            tail.append(prefix)
        return tail
