"""`kvatlas indexer`: one indexer process."""

from typing import TYPE_CHECKING

from kvatlas.settings import IndexerSettings
from kvatlas_cli.flags import with_settings
from kvatlas_cli.runner import print_ready, run_service

if TYPE_CHECKING:
    from kvatlas_indexer.indexer_process import Replica


@with_settings(IndexerSettings)
def indexer(settings: IndexerSettings) -> None:
    """Apply publishers' messages to the index. Any number of replicas share the partitions."""
    from kvatlas_indexer.service import run_indexer  # needs the extra

    run_service(
        "indexer", settings, run_indexer(settings, ready=_print_ready), metrics_page=settings.status_port is not None
    )


def _print_ready(replica: "Replica") -> None:
    page = f"; status page {replica.status_url}" if replica.status_url else ""
    print_ready(f"indexer {replica.member_id} is ready{page}")
