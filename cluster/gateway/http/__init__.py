"""The gateway's HTTP port: console, JSON API, live events, OpenAI protocol and metrics."""
