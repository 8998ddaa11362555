"""Operators of the domain ``graphrot``: nodes, function bodies, float64 references and the native library."""
