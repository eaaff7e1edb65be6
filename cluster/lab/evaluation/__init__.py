"""Accuracy on labelled videos through the live code path, under many settings, relative to full computation."""
