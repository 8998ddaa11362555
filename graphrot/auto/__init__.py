"""Choices that are made by measuring the model: which rotations to take, and the grid of every weight."""
