from tests.kvatlas_cli.auth.guarded_servers import servers
from tests.kvatlas_cli.auth.store_servers import guarded_store

__all__ = ["guarded_store", "servers"]
