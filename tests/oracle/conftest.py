"""The oracle: vLLM's own KV cache manager. Opt-in, because it needs vLLM and torch in a Python of their own (`make oracle`)."""

import os

PYTHON = os.environ.get("KVATLAS_ORACLE_PYTHON")

collect_ignore_glob = [] if PYTHON else ["test_*.py"]
