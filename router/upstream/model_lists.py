"""The models and adapters that each engine lists, polled because adapters are loaded and unloaded while an engine
runs."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas_router.upstream.engine_client import EngineAway, EngineClient
from kvatlas_router.upstream.peer_timeouts import wait_patiently

LIST_AGE_S = 5.0
"""Interval at which each engine is asked."""
LIST_S = 2.0
"""Time limit for an engine's answer."""
MOST_AT_ONCE = 32

_log = logging.getLogger("kvatlas_router.proxy")

Card = Mapping[str, Any]


@dataclass(slots=True)
class _List:
    """One engine's list. `cards=None`: the engine has never returned one."""

    asked_at: float
    cards: Mapping[str, Card] | None = None


class ModelLists:
    """Lists by base URL. `version` grows whenever one of them changes."""

    def __init__(self, client: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        """The caller owns the client and closes it."""
        self.version = 0
        self._client = client
        self._clock = clock
        self._lists: dict[str, _List] = {}
        self._refreshing = asyncio.Lock()
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)

    def cards_of(self, url: str) -> Mapping[str, Card] | None:
        """The engine's latest list, by name; None if it has never returned one."""
        known = self._lists.get(url)
        return None if known is None else known.cards

    def remove(self, url: str, name: str) -> None:
        """Treat the name as unloaded, because the engine refused a request for it, and ask the engine again soon."""
        known = self._lists.get(url)
        if known is not None and known.cards is not None and name in known.cards:
            known.cards = {other: card for other, card in known.cards.items() if other != name}
            known.asked_at = float("-inf")
            self.version += 1

    async def refresh(self, urls: Callable[[], Awaitable[Collection[str]]], age_s: float) -> None:
        """Ask the engines whose lists are older than `age_s`. Concurrent calls share the answers."""
        began = self._clock()
        async with self._refreshing:
            wanted = set(await urls())
            for gone in self._lists.keys() - wanted:
                del self._lists[gone]
                self.version += 1
            stale = [url for url in wanted if url not in self._lists or began - self._lists[url].asked_at >= age_s]
            await asyncio.gather(*map(self._ask, stale))

    async def _ask(self, url: str) -> None:
        async with self._slots:
            asked_at = self._clock()
            cards = await self._read(url)
        known = self._lists.setdefault(url, _List(asked_at))
        known.asked_at = asked_at
        if cards is not None and (known.cards is None or cards.keys() != known.cards.keys()):
            known.cards = cards
            self.version += 1

    async def _read(self, url: str) -> Mapping[str, Card] | None:
        """The engine's list now; None if it does not answer with a list, in which case its previous one still
        counts."""
        try:
            answer = await wait_patiently(self._client.call("GET", f"{url.rstrip('/')}/v1/models"), LIST_S)
            data = answer.json()["data"] if answer.status == 200 else None
        except (EngineAway, TimeoutError, ValueError, LookupError, TypeError) as error:
            _log.debug("%s/v1/models: %s", url, str(error) or type(error).__name__)
            return None
        if not isinstance(data, list):
            return None
        return {card["id"]: card for card in data if isinstance(card, dict) and isinstance(card.get("id"), str)}


def merge_cards(lists: Sequence[Mapping[str, Card]]) -> Mapping[str, Card]:
    """All names, each with the card from the first list that contains it."""
    merged: dict[str, Card] = {}
    for cards in lists:
        for name, card in cards.items():
            merged.setdefault(name, card)
    return merged
