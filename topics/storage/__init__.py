"""Bytes on disk. One module owns each format."""
