"""`kvatlas doctor`: checks that an installation is set up correctly, and that every part of it is alive.

Each check first reads and then judges. Functions that judge take values and return findings.
"""

from kvatlas_cli.doctor.examination import examine
from kvatlas_cli.doctor.finding import Finding, Level
from kvatlas_cli.doctor.request import follow_request, read_request

__all__ = ["Finding", "Level", "examine", "follow_request", "read_request"]
