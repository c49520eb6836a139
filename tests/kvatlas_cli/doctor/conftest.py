from collections.abc import AsyncIterator

import pytest

from tests.kvatlas_cli.doctor.installation import Installation, running_installation


@pytest.fixture
async def installation() -> AsyncIterator[Installation]:
    """Servers of this test, without any data."""
    async with running_installation() as started:
        yield started
