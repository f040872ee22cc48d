"""What a shard does with queues: calls, what of them is logged, who waits for jobs."""
