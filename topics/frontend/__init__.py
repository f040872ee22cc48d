"""The process that speaks HTTP: validates, forwards writes to the owner, serves reads from shared memory and files."""
