"""Queues and named cursors over HTTP: claims, streams of jobs, dead letters."""
