"""Who may do what: tokens, roles, camera scopes, rates, and the book of who did. No sockets here."""
