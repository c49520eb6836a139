from tests.router.conftest import *  # noqa: F403
from tests.router.gateway.conftest import envoy  # noqa: F401
