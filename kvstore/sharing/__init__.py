"""Sessions and blocks between a store and remotes: plan, show, apply."""
