"""Accuracy of answers about the past under each memory policy."""
