"""The process that owns topics: assigns seqs, writes the WAL, publishes."""
