"""The console: web pages that the gateway serves. Plain ES modules and style sheets, nothing to build."""
