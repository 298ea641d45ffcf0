"""The cases, a module for each area."""
