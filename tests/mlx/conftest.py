"""The real mlx-lm, which has its own environment: `make test-mlx` collects these tests, no other run."""

from __future__ import annotations

import importlib.util
import warnings

if importlib.util.find_spec("mlx_lm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():  # what it says while it is imported is not ours
        warnings.simplefilter("ignore")
        import mlx_lm  # noqa: F401
