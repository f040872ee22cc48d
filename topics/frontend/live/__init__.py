"""Live delivery: event streams and WebSockets, and the way of records to them."""
