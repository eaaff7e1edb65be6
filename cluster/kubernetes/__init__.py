"""Cameras as Kubernetes resources, and the reconciler that brings the cluster to them."""
