"""Accuracy of questions about the past under each memory policy."""
