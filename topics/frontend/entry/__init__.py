"""A request meets this before its route: keys, the body and its checks, bounds of what is held. Answers leave by it."""
