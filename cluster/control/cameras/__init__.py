"""Cameras as people declare them: who may change which, files of them, and Kubernetes resources of them.

Everything but ``kubernetes_api`` and ``watch`` is plain Python; nothing here knows Ray or gRPC.
"""
