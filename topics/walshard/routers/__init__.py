"""Routers: a shard copies records of any shard's topics into its own topics."""
