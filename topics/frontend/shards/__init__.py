"""The way to the shards: rings with their answers, the index arenas, who watches which topic."""
