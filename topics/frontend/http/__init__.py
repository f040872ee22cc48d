"""Connections: HTTP/1.1 of our own, what stays Hypercorn's, listeners and drain."""
