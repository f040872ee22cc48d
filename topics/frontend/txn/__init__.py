"""Commits over several topics: stages, and who carries a decided batch to its end."""
