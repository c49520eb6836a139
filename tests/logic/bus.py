"""The stream: it loses its oldest and its newest messages, and is created again."""

from typing import TYPE_CHECKING

from kvatlas.bus.stream import StreamInfo

if TYPE_CHECKING:
    from tests.logic.world import World


class Stream:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.creation_us = 1
        self.last_seq = 0
        self.messages: list[tuple[int, str, bytes]] = []
        """(stream seq, subject, payload)"""

    def append(self, subject: str, payload: bytes) -> int:
        self.last_seq += 1
        self.messages.append((self.last_seq, subject, payload))
        return self.last_seq

    @property
    def info(self) -> StreamInfo:
        first_seq = self.messages[0][0] if self.messages else self.last_seq + 1
        return StreamInfo(self.creation_us, first_seq, self.last_seq)

    def read(self, partition: int, after_seq: int, count: int) -> list[tuple[int, str, bytes]]:
        token = f"kvatlas.events.{partition}."
        return [one for one in self.messages if one[0] > after_seq and one[1].startswith(token)][:count]

    def lose_oldest(self, count: int) -> None:
        """Lose the oldest messages to the stream's limits, or to a purge."""
        self.messages = self.messages[count:]

    def lose_newest(self, count: int) -> None:
        """Lose the newest messages, as if a server had come back without its last writes: their numbers are used again."""
        for _ in range(min(count, len(self.messages))):
            self.messages.pop()
            self.last_seq -= 1

    def create_again(self) -> None:
        self.creation_us += 1
        self.last_seq, self.messages = 0, []
