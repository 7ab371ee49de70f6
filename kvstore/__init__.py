"""The store: files, index, sessions, restore. `kvsnap.kvstore.store` is the one door."""
