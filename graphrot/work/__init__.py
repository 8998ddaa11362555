"""Work that can be stopped at any moment: locks, work folders, files that appear whole."""
