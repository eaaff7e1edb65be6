"""Alerts: from answers to standing questions, and from cameras' own state, to incidents and to those who must know.

Everything but the service and the sinks is plain Python that time comes into; nothing here knows Ray or gRPC.
"""
