"""Code shared by tests of several folders: layers and recipes, comparisons, tolerances, oracles, settings to change."""
