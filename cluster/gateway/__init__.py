"""The gateway: proxies to the owners of cameras, the guard, merged answers, HTTP and the console."""
