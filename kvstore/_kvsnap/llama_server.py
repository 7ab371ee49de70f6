"""`python -m kvsnap.llama_server --model FILE.gguf [--kvsnap-store PATH] …`: llama-cpp-python's
server, whose models keep what they computed in a store, across restarts."""

from __future__ import annotations

from kvsnap.engines.llama_cache_server import create_app, main

__all__ = ["create_app", "main"]

if __name__ == "__main__":
    main()
