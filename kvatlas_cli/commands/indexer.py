"""`kvatlas indexer`: one replica of the indexer."""

from typing import TYPE_CHECKING

from kvatlas.settings import IndexerSettings
from kvatlas_cli.flags import with_settings
from kvatlas_cli.runner import run_service, tell

if TYPE_CHECKING:
    from indexer.replica import Replica


@with_settings(IndexerSettings)
def indexer(settings: IndexerSettings) -> None:
    """Fold what publishers tell into the index. Any number of replicas share the work."""
    from indexer.service import run_indexer  # needs the extra

    run_service("indexer", settings, run_indexer(settings, ready=_ready))


def _ready(replica: "Replica") -> None:
    page = f"; status page {replica.status_url}" if replica.status_url else ""
    tell(f"indexer {replica.member_id} is ready{page}")
