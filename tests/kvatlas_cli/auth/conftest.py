from tests.kvatlas_cli.auth.guarded_servers import servers

__all__ = ["servers"]
