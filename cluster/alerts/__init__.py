"""Alerting: turns answers and camera states into incidents, and delivers incident events to sinks.

Only the service and the sinks do I/O. The rest is plain Python that receives the time as an argument; nothing here
depends on Ray or gRPC.
"""
