"""Example prompts and programs."""
