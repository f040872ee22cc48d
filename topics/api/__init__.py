"""Types of the bodies of HTTP requests and answers. Nothing here imports anything of the package."""
