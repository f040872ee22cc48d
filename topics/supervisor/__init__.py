"""The process that starts, watches and stops the others."""
