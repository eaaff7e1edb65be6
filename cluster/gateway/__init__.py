"""The gateway: proxies to the processes that own cameras, access guard, merged answers, HTTP and the console."""
