"""The way of a request to its route (keys, body, checks, memory bounds), and the way of its answer out."""
