"""What a request meets before its route: keys, the body and its checks, bounds of what is held, and answers."""
