"""The process that turns WAL into segments and snapshots."""
