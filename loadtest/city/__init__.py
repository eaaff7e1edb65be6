"""A simulated city on a fixed pool: production's placement, admission, queues and ladder on made time."""
