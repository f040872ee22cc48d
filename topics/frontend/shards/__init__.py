"""The connections to the shards: rings of requests and replies, index arenas, watches of topics."""
