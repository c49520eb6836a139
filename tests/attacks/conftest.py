from tests.router.conftest import *  # noqa: F403
