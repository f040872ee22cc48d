"""Where records are and how pages are made of them: log, segments, cold tier."""
