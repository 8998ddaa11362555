"""Whole models side by side: speed of prefill and of decoding, and memory; measured in turns, as ratios."""
