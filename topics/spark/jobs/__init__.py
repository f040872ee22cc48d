"""Pipelines as programs: `topics spark JOB …`, or `spark-submit` with a module of this package. Each has `--help`."""
