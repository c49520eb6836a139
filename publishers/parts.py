"""The objects that the parts of one publisher share."""

import random
from dataclasses import dataclass, field

from nats.aio.client import Client

from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.runtime.wakeup import Wakeup
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.diagnoses import Diagnoses
from kvatlas_publishers.settings import PublisherSettings
from kvatlas_publishers.stream.changelog import Changelog


@dataclass(slots=True)
class PublisherParts:
    """`due`: woken when an incarnation is due, or when a waiting one may continue. `client`: set when the publisher is
    entered."""

    settings: PublisherSettings
    changelog: Changelog
    counters: PublisherCounters
    diagnoses: Diagnoses
    log: RateLimitedLog
    rng: random.Random
    due: Wakeup = field(default_factory=Wakeup)
    client: Client = field(init=False)

    @property
    def worker_id(self) -> str:
        return self.settings.worker_id
