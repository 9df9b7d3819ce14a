"""The HTTP server: OpenAI's routes over one engine that many requests share."""
