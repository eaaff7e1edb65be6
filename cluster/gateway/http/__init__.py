"""The gateway's HTTP: console, JSON, live events, OpenAI's protocol and metrics on one port."""
