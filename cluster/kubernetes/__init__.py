"""Cameras as Kubernetes resources, and the reconciler that applies them to the cluster."""
