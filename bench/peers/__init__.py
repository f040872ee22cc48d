"""Other systems that a Python user might pick, at the same work on the same machine."""
