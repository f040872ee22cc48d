"""What is pushed: watches over event streams and WebSockets, and how records get to them."""
