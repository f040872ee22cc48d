"""Connections: our own HTTP/1.1, HTTP/2 on Hypercorn, listeners and drain."""
