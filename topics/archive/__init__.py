"""The archive: copies of a service's data in a folder or a bucket, from which it can be restored as it was."""
