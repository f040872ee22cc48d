"""Programs that use `topics` as a client would: over HTTP, with nothing of the server imported."""
