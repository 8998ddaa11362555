"""Orthogonal matrices: how they are constructed, and how they act without being written out."""
