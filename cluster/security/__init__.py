"""Access control: tokens, roles, camera scopes, rate limits and the audit log. No sockets here."""
