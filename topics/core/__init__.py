"""The rules, pure: no I/O, no clock, no process. Imports nothing of ours."""
