"""Memory: the arena of head pages, and which pages each request's heads own."""
