"""Reads: the places of records (log, segments, cold tier), and the pages that are made of them."""
