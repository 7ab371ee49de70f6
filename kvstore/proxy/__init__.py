"""A companion in front of a stock llama-server: what its slots compute is kept in a store."""
