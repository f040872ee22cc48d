"""The routes of topics, records and routers, and the table that says what the API offers."""
