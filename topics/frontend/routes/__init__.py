"""The routes of topics, records and routers, and the types of the table of all operations."""
