"""Routers: what a shard copies from topics to topics, its own and other shards'."""
