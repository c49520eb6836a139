"""The oracle: the engines' own caches. Opt-in, because they need torch in a Python of their own (`make oracle`)."""

import os
from pathlib import Path

PYTHON = os.environ.get("KVATLAS_ORACLE_PYTHON")
SGLANG = Path(os.environ["KVATLAS_ORACLE_SGLANG"]) if os.environ.get("KVATLAS_ORACLE_SGLANG") else None
"""A folder with the unpacked packages of SGLang, each in one named by its version."""

collect_ignore_glob = [] if PYTHON else ["test_*.py"]
