"""`python -m kvsnap.llama_server --model FILE.gguf [--kvsnap-store PATH] …`: llama-cpp-python's
server, whose models keep what they computed in a store, across restarts."""

from __future__ import annotations

import sys

try:
    from kvsnap.engines.llama_cache_server import create_app, main
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(
        f"error: llama-cpp-python cannot be imported: {error}\nhint: pip install 'kvsnap[server]'"
    )

__all__ = ["create_app", "main"]

if __name__ == "__main__":
    main()
