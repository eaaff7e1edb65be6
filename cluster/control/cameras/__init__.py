"""Cameras as people declare them: the table of them, who may change which, and what a change asks for."""
