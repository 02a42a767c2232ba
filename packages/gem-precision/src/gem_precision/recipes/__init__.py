"""The recipes, one module each; loaded on use."""
