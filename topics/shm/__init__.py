"""Bytes in memory: what the processes of one service share."""
