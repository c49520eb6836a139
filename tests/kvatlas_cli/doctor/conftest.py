from collections.abc import AsyncIterator

import pytest

from tests.kvatlas_cli.doctor.installation import Installation, installation


@pytest.fixture
async def system() -> AsyncIterator[Installation]:
    """Empty servers of this test's own."""
    async with installation() as made:
        yield made
