"""`kvatlas publish` as a child process."""

import signal

from kvatlas.embedded import ServerProcess
from tests.kvatlas_cli.conftest import UNUSED_ADDRESS, child
